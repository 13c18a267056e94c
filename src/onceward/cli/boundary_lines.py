"""Facts as lines of JSON: `append --lines` reads them, `fetch --json` writes them."""

from __future__ import annotations

import math
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import IO, TYPE_CHECKING, Any

import msgspec
import typer

from onceward.cli.boundary_calling import connected, told
from onceward.cli.database import MISUSED, fail
from onceward.cli.printing import print_json

if TYPE_CHECKING:
    from onceward.boundary import BoundaryClient, Envelope, Fact, StoredFact

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
    with source, connected(url, as_json) as client, _progress(source, as_json) as progress:
        appending = Appending(client, progress)
        appending.run(source)
    counts = f"{appending.appended:,} appended, {appending.known:,} there already"
    if appending.problems:
        number, problem = min(appending.problems, key=lambda each: each[0])
        fail(f"line {number}: {told(problem, url)} ({counts}; it is safe to repeat all lines)", as_json)
    if as_json:
        print_json(
            {"appended": appending.appended, "duplicates": appending.known, "last_offset": appending.last}
        )
    else:
        typer.echo(f"{counts}; the last offset is {appending.last:,}." if appending.last else "No lines.")


class Appending:
    """Appends lines with some threads. Lines of one subject go to one thread, and so keep their order."""

    def __init__(self, client: BoundaryClient, progress: Callable[[int], None]) -> None:
        self._client = client
        self._progress = progress
        self._lock = Lock()
        self._until = math.inf
        self.appended = self.known = self.last = 0
        self.problems: list[tuple[int, Exception]] = []

    def run(self, lines: IO[bytes]) -> None:
        """All, or those before a line that is refused."""
        queues: list[Queue[Any]] = [Queue(AHEAD) for _ in range(AT_ONCE)]
        threads = [Thread(target=self._work, args=(queue,), daemon=True) for queue in queues]
        for thread in threads:
            thread.start()
        try:
            self._read(lines, queues)
        except BaseException:
            self._until = 0
            raise
        finally:
            for queue in queues:
                queue.put(None)
            for thread in threads:
                thread.join()

    def _read(self, lines: IO[bytes], queues: list[Queue[Any]]) -> None:
        for number, line in enumerate(lines, 1):
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
            queues[chosen].put((number, envelope, fact, len(line)))

    def _work(self, queue: Queue[Any]) -> None:
        while (work := queue.get()) is not None:
            if work[0] < self._until:
                self._append(*work)

    def _append(self, number: int, envelope: Envelope, fact: Fact, size: int) -> None:
        try:
            appended = self._client.append(envelope, fact)
        except Exception as error:  # noqa: BLE001  told with its line, whatever it is
            with self._lock:
                # A bad line keeps none before it from being appended; a boundary that cannot take any does.
                self._until = 0 if getattr(error, "retryable", False) else min(self._until, number)
                self.problems.append((number, error))
            return
        with self._lock:
            self.known += appended.duplicate
            self.appended += not appended.duplicate
            self.last = max(self.last, appended.offset)
        self._progress(size)


@contextmanager
def _progress(source: IO[bytes], as_json: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing anywhere else."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield lambda size: None
        return
    status = os.fstat(source.fileno())
    total = status.st_size if stat.S_ISREG(status.st_mode) else None
    columns = (TextColumn("appending"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda size: bars.advance(task, size)
