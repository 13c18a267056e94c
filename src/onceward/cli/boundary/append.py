"""`onceward boundary append`: append facts to a boundary, one or many."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from onceward.cli.boundary.options import HERE, Url, connect
from onceward.cli.boundary.transfers import pieces_of, progress_of, size_of
from onceward.cli.exit import MISUSED, AsJson, fail, option, refuse_path
from onceward.cli.output import echo, print_json
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.boundary import AsyncBoundaryClient, Envelope, Fact, StoredFact

AT_ONCE = 32
"""Concurrent appends: they share the server's fsync."""
AHEAD = 16
"""Lines read ahead for each of them."""
ALL_NEEDED = "One fact (all required)"
ONE_NEEDED = "Message id (one required)"
INSTEAD = "Or many facts"


def append(
    subject: Annotated[
        str | None, option("KIND:ID", "What it is about, as in batch:B1042.", rich_help_panel=ALL_NEEDED)
    ] = None,
    predicate: Annotated[
        str | None, option("NAME", "What happened, in lower_snake_case.", rich_help_panel=ALL_NEEDED)
    ] = None,
    value: Annotated[
        str | None,
        option("JSON|@FILE|-", "Details; - reads standard input.", "--object", rich_help_panel=ALL_NEEDED),
    ] = None,
    from_zone: Annotated[str | None, option("ZONE", "Where it happened.", rich_help_panel=ALL_NEEDED)] = None,
    to_zone: Annotated[str | None, option("ZONE", "Zone it is for.", rich_help_panel=ALL_NEEDED)] = None,
    message_id: Annotated[
        str | None,
        option("ID", "The same for every retry, and for nothing else.", rich_help_panel=ONE_NEEDED),
    ] = None,
    id_part: Annotated[
        list[str] | None,
        option(
            "TEXT",
            "Part to derive the id from, as in `message_id_for`; repeatable.",
            rich_help_panel=ONE_NEEDED,
        ),
    ] = None,
    label: Annotated[list[str] | None, option("NAME=VALUE", "A hint for operators; repeatable.")] = None,
    correlation_id: Annotated[str, option("ID", "Id of the wider conversation.")] = "",
    causation_id: Annotated[str, option("ID", "Id of the message that led to this.")] = "",
    lines: Annotated[
        str | None, option("FILE|-", "File with {envelope, fact} on each line.", rich_help_panel=INSTEAD)
    ] = None,
    url: Url = HERE,
    as_json: AsJson = False,
) -> None:
    """Append a fact, or many with `--lines`. Safe to repeat: a fact that is already there is not appended again.

    Lines are appended many at a time, those of one subject in order. `fetch --json` writes such lines.

    Exit code: 0, even if it was already there; 1 if the boundary refuses or cannot be reached; 2 for wrong arguments.
    """
    needed = {
        "--subject": subject,
        "--predicate": predicate,
        "--object": value,
        "--from-zone": from_zone,
        "--to-zone": to_zone,
    }
    if lines is not None:
        others = {
            **needed,
            "--message-id": message_id,
            "--id-part": id_part,
            "--label": label,
            "--correlation-id": correlation_id,
            "--causation-id": causation_id,
        }
        if extra := [name for name, given in others.items() if given]:
            fail(f"--lines takes everything from its lines; remove {extra[0]}", as_json, MISUSED)
        append_lines(lines, url, as_json)
        return
    if missing := [name for name, given in needed.items() if not given]:
        fail(f"missing {', '.join(missing)}; see `onceward boundary append --help`", as_json, MISUSED)
    labels = _labels(label or [], as_json)
    body = _read(str(value), as_json)
    with connect(url, as_json) as (client, runner):
        from onceward.boundary import Fact, envelope_for

        made_id = _message_id(message_id, id_part, as_json)
        envelope = envelope_for(
            made_id,
            from_zone=str(from_zone),
            to_zone=str(to_zone),
            labels=labels,
            correlation_id=correlation_id,
            causation_id=causation_id,
        )
        fact = Fact(subject=str(subject), predicate=str(predicate), object_json=body)
        appended = runner.run(client.append(envelope, fact))
    if as_json:
        print_json({"offset": appended.offset, "duplicate": appended.duplicate, "message_id": made_id})
    elif appended.duplicate:
        echo(f"Already there, at offset {appended.offset}.")
    else:
        echo(f"Appended at offset {appended.offset}.")


def _message_id(given: str | None, parts: list[str] | None, as_json: bool) -> str:
    from onceward.boundary import message_id_for

    if bool(given) == bool(parts):
        fail(
            "pass either --message-id, or --id-part for each part that makes this event unique",
            as_json,
            MISUSED,
        )
    try:
        return given or message_id_for(*parts or ())
    except ValueError as error:
        fail(f"--id-part: {error}", as_json, MISUSED)


def _labels(given: list[str], as_json: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals or name in found:
            fail(f"--label must be NAME=VALUE with each name once, not {each!r}", as_json, MISUSED)
        found[name] = value
    return found


def _read(value: str, as_json: bool) -> str:
    try:
        if value == "-":
            return _check_piped(sys.stdin.read(), as_json)
        return Path(value[1:]).read_text(encoding="utf-8") if value.startswith("@") else value
    except (OSError, ValueError) as error:
        fail(f"--object {value} cannot be read: {error}", as_json, MISUSED)


def _check_piped(text: str, as_json: bool) -> str:
    """Fail if the previous command of a pipe failed and wrote its error in place of a result."""
    try:
        found = json.loads(text)
    except ValueError:
        return text  # the boundary reports what is wrong with it
    if isinstance(found, dict) and found.keys() == {"error"}:
        fail(
            f"--object -: the previous command failed, so nothing is appended: {found['error']}",
            as_json,
        )
    return text


# ── many facts, as lines of JSON: `append --lines` reads them, `fetch --json` writes them ───────────────────


def as_line(stored: StoredFact) -> bytes:
    """Encode a fact as one line, with the object as JSON rather than as a string."""
    value = msgspec.Raw(msgspec.json.format(stored.fact.object_json, indent=-1).encode())
    return msgspec.json.encode(
        {
            "offset": stored.offset,
            "appended_at_unix_ms": stored.appended_at_unix_ms,
            "envelope": stored.envelope,
            "fact": {"subject": stored.fact.subject, "predicate": stored.fact.predicate, "object": value},
        }
    )


class LineFact(msgspec.Struct, forbid_unknown_fields=True):
    subject: str
    predicate: str
    object: msgspec.Raw = msgspec.Raw()
    object_json: str = ""


class FactLine(msgspec.Struct, forbid_unknown_fields=True):
    """What `as_line` writes and people write: they omit the offset, and the time if it is now."""

    envelope: dict[str, Any]
    fact: LineFact
    offset: int | None = None
    appended_at_unix_ms: int | None = None


def parse_line(line: bytes) -> tuple[Envelope, Fact]:
    """Parse a line. Raises ValueError. The boundary itself checks the values of the fields."""
    from onceward.boundary import Envelope, Fact

    given = msgspec.json.decode(line, type=FactLine)
    if unknown := given.envelope.keys() - set(Envelope.__struct_fields__):
        raise ValueError(f"an envelope has no {min(unknown)!r}")
    if bool(given.fact.object) == bool(given.fact.object_json):
        raise ValueError("a fact needs either object, or object_json with it as a string")
    try:
        envelope = msgspec.convert(
            {"produced_at_unix_ms": time.time_ns() // 1_000_000, **given.envelope}, Envelope
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"envelope: {error}") from None
    body = given.fact.object_json or bytes(given.fact.object).decode()
    return envelope, Fact(subject=given.fact.subject, predicate=given.fact.predicate, object_json=body)


def append_lines(name: str, url: str, as_json: bool) -> None:
    """Append all lines of a file or of standard input."""
    with refuse_path(name, as_json):
        source = typer.get_binary_stream("stdin") if name == "-" else Path(name).open("rb")  # noqa: SIM115
    with (
        source,
        connect(url, as_json) as (client, runner),
        progress_of("appending", size_of(source), as_json) as progress,
    ):
        appending = Appending(client, progress.advance)
        runner.run(appending.run(source))
    counts = f"{appending.appended:,} appended, {appending.known:,} already there"
    if appending.problems:
        number, problem = min(appending.problems, key=lambda each: each[0])
        fail(f"line {number}: {problem} ({counts}; it is safe to repeat all lines)", as_json)
    if as_json:
        print_json(
            {"appended": appending.appended, "duplicates": appending.known, "last_offset": appending.last}
        )
    else:
        echo(f"{counts}; the last offset is {appending.last:,}." if appending.last else "No lines.")


class Appending:
    """Appends many lines at a time. Lines of one subject share a queue, so they keep their order."""

    def __init__(self, client: AsyncBoundaryClient, progress: Callable[[int], object]) -> None:
        self._client = client
        self._progress = progress
        self._lines = 0
        self._until = math.inf
        self.appended = self.known = self.last = 0
        self.problems: list[tuple[int, Exception]] = []

    async def run(self, source: IO[bytes]) -> None:
        """Append all lines, or those before one that is refused."""
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue(AHEAD) for _ in range(AT_ONCE)]
        async with asyncio.TaskGroup() as tasks:
            for queue in queues:
                tasks.create_task(self._work(queue))
            try:
                await self._read(source, queues)
            except ConfigurationError as error:  # the rest cannot be read
                self.problems.append((self._lines + 1, error))
            for queue in queues:
                await queue.put(None)

    async def _read(self, source: IO[bytes], queues: list[asyncio.Queue[Any]]) -> None:
        async for line in _lines(source):
            self._lines = number = self._lines + 1
            if number > self._until:
                return
            if not line.strip():
                continue
            try:
                envelope, fact = parse_line(line)
            except (ValueError, RecursionError) as error:
                self.problems.append((number, error))
                return
            chosen = zlib.crc32(fact.subject.encode()) % len(queues)
            await queues[chosen].put((number, envelope, fact, len(line) + 1))

    async def _work(self, queue: asyncio.Queue[Any]) -> None:
        while (work := await queue.get()) is not None:
            if work[0] < self._until:
                await self._append(*work)

    async def _append(self, number: int, envelope: Envelope, fact: Fact, size: int) -> None:
        try:
            appended = await self._client.append(envelope, fact)
        except Exception as error:  # noqa: BLE001  reported with its line, whatever it is
            # A bad line does not stop those before it; a boundary that cannot take any does.
            self._until = 0 if getattr(error, "retryable", False) else min(self._until, number)
            self.problems.append((number, error))
            return
        self.known += appended.duplicate
        self.appended += not appended.duplicate
        self.last = max(self.last, appended.offset)
        self._progress(size)


async def _lines(source: IO[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces_of(source):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
