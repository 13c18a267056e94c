"""Facts as lines of JSON: `append --lines` reads them, `fetch --json` writes them."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import typer

from onceward.cli.boundary_calling import connected
from onceward.cli.boundary_transfers import pieces_of, progress_of, size_of
from onceward.cli.database import MISUSED, fail
from onceward.cli.printing import print_json

if TYPE_CHECKING:
    from onceward.boundary import AsyncBoundaryClient, Envelope, Fact, StoredFact

AT_ONCE = 32
"""Appends on the way at the same time: they share the server's fsync."""
AHEAD = 16
"""Lines that are read already, for each of them."""


def as_line(stored: StoredFact) -> bytes:
    """With the object as JSON and not as a text, and in one line whatever its own form was."""
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


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """What `as_line` writes, and what people write: no offset, and the time only if it is not now."""

    envelope: dict[str, Any]
    fact: LineFact
    offset: int | None = None
    appended_at_unix_ms: int | None = None


def parsed(line: bytes) -> tuple[Envelope, Fact]:
    """Raises ValueError. What its fields may hold is the boundary's business."""
    from onceward.boundary import Envelope, Fact

    given = msgspec.json.decode(line, type=Line)
    if unknown := given.envelope.keys() - set(Envelope.__struct_fields__):
        raise ValueError(f"an envelope has no {min(unknown)!r}")
    if bool(given.fact.object) == bool(given.fact.object_json):
        raise ValueError("a fact has an object, or object_json with it as a text")
    try:
        envelope = msgspec.convert(
            {"produced_at_unix_ms": time.time_ns() // 1_000_000, **given.envelope}, Envelope
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"envelope: {error}") from None
    body = given.fact.object_json or bytes(given.fact.object).decode()
    return envelope, Fact(subject=given.fact.subject, predicate=given.fact.predicate, object_json=body)


def append_lines(name: str, url: str, as_json: bool) -> None:
    """All lines of a file, or of standard input."""
    try:
        source = typer.get_binary_stream("stdin") if name == "-" else Path(name).open("rb")  # noqa: SIM115
    except OSError as error:
        fail(f"{name} cannot be read: {error.strerror}", as_json, MISUSED)
    with (
        source,
        connected(url, as_json) as (client, runner),
        progress_of("appending", size_of(source), as_json) as progress,
    ):
        appending = Appending(client, progress.advance)
        runner.run(appending.run(source))
    counts = f"{appending.appended:,} appended, {appending.known:,} there already"
    if appending.problems:
        number, problem = min(appending.problems, key=lambda each: each[0])
        fail(f"line {number}: {problem} ({counts}; it is safe to repeat all lines)", as_json)
    if as_json:
        print_json(
            {"appended": appending.appended, "duplicates": appending.known, "last_offset": appending.last}
        )
    else:
        typer.echo(f"{counts}; the last offset is {appending.last:,}." if appending.last else "No lines.")


class Appending:
    """Appends lines, many at a time. Lines of one subject go into one queue, and so keep their order."""

    def __init__(self, client: AsyncBoundaryClient, progress: Callable[[int], object]) -> None:
        self._client = client
        self._progress = progress
        self._until = math.inf
        self.appended = self.known = self.last = 0
        self.problems: list[tuple[int, Exception]] = []

    async def run(self, source: IO[bytes]) -> None:
        """All, or those before a line that is refused."""
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue(AHEAD) for _ in range(AT_ONCE)]
        async with asyncio.TaskGroup() as tasks:
            for queue in queues:
                tasks.create_task(self._work(queue))
            await self._read(source, queues)
            for queue in queues:
                await queue.put(None)

    async def _read(self, source: IO[bytes], queues: list[asyncio.Queue[Any]]) -> None:
        number = 0
        async for line in _lines(source):
            number += 1
            if number > self._until:
                return
            if not line.strip():
                continue
            try:
                envelope, fact = parsed(line)
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
        except Exception as error:  # noqa: BLE001  told with its line, whatever it is
            # A bad line keeps none before it from being appended; a boundary that cannot take any does.
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
