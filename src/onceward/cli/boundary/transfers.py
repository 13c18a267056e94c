"""Transfer data in pieces: Ctrl-C interrupts it, and a terminal shows a progress bar."""

from __future__ import annotations

import asyncio
import io
import os
import select
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from onceward._text import printable
from onceward.cli.exit import reason_of
from onceward.cli.output import progress_bars
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PIECE = 256 * 1024
EMPTY_SECONDS = 0.02


async def pieces_of(source: IO[bytes]) -> AsyncIterator[bytes]:
    raw: Any = getattr(source, "raw", source)  # a buffer could hold data that select does not see
    while True:
        while not _is_ready(raw):  # an empty pipe must not block Ctrl-C
            await asyncio.sleep(EMPTY_SECONDS)
        try:
            piece = raw.read(PIECE)
        except OSError as error:  # of a disk, or of a file that can be opened but not read
            raise ConfigurationError(
                f"{_name(source)} cannot be read: {reason_of(error)}; name another file"
            ) from None
        if not piece:
            return
        yield piece


def _name(source: IO[bytes]) -> str:
    return source.name if isinstance(source.name, str) else "standard input"


def _is_ready(source: Any) -> bool:
    try:
        return bool(select.select([source], [], [], 0)[0])
    except io.UnsupportedOperation:  # in memory
        return True


def size_of(source: IO[bytes]) -> int | None:
    """The size of a file; None for a pipe."""
    try:
        status = os.fstat(source.fileno())
    except io.UnsupportedOperation:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


class Bar(NamedTuple):
    """The progress bar of a transfer."""

    bars: Progress
    task: TaskID

    def advance(self, size: int) -> None:
        self.bars.advance(self.task, size)

    def whole(self, size: int) -> None:
        """Set the total number of bytes."""
        self.bars.update(self.task, total=size)


@contextmanager
def progress_of(what: str, total: int | None, as_json: bool) -> Iterator[Bar]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
    )
    with progress_bars(as_json, *columns) as bars:
        yield Bar(bars, bars.add_task(printable(what), total=total))
