"""What goes through a command in pieces: read so that Ctrl-C ends it, and shown by a bar on a terminal."""

from __future__ import annotations

import asyncio
import io
import os
import select
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PIECE = 256 * 1024
EMPTY_SECONDS = 0.02


async def pieces_of(source: IO[bytes]) -> AsyncIterator[bytes]:
    raw: Any = getattr(source, "raw", source)  # a buffer could have what the system does not know of
    while True:
        while not _is_ready(raw):  # a pipe that is empty must not keep Ctrl-C from us
            await asyncio.sleep(EMPTY_SECONDS)
        if not (piece := raw.read(PIECE)):
            return
        yield piece


def _is_ready(source: Any) -> bool:
    try:
        return bool(select.select([source], [], [], 0)[0])
    except io.UnsupportedOperation:  # it is in memory
        return True


def size_of(source: IO[bytes]) -> int | None:
    """None for a pipe, which nobody knows the end of."""
    try:
        status = os.fstat(source.fileno())
    except io.UnsupportedOperation:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


class Bar:
    """How far a transfer is."""

    def __init__(self, bars: Progress | None = None, task: TaskID | None = None) -> None:
        self._bars = bars
        self._task = task

    def advance(self, size: int) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, size)

    def whole(self, size: int) -> None:
        """So many bytes it will be."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, total=size)


@contextmanager
def progress_of(what: str, total: int | None, as_json: bool) -> Iterator[Bar]:
    """A bar on a terminal, nothing anywhere else."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield Bar()
        return
    columns = (
        TextColumn(what, markup=False),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield Bar(bars, bars.add_task("", total=total))
