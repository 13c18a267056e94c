"""Files and directories that only their owner may read, whatever the umask: they hold messages.

What exists keeps its mode. SQLite gives the files beside a database the mode of the database.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

FILE = 0o600
DIRECTORY = 0o700
UNLINKABLE = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""A file system without hard links."""


def make_directory(path: str | os.PathLike[str]) -> None:
    """Make it and its missing parents."""
    directory = Path(path)
    try:
        os.mkdir(directory, DIRECTORY)
    except FileNotFoundError:
        if directory.parent.is_dir():  # such as /proc, where nothing can be made
            raise
        make_directory(directory.parent)
        make_directory(directory)
    except FileExistsError:
        if not directory.is_dir():
            raise
    else:
        os.chmod(directory, DIRECTORY)


def create_file(path: str | os.PathLike[str]) -> None:
    """Create an empty file before a database is opened there, unless there is one. Follows symlinks, as SQLite does.

    An error is left to SQLite, which meets it, too.
    """
    with suppress(OSError):
        open_new(os.path.realpath(path)).close()


def open_new(path: str | os.PathLike[str], buffering: int = -1) -> Any:
    """Create a file and open it for writing. Raises `FileExistsError`, also for a symlink, wherever it leads."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE)
    os.fchmod(descriptor, FILE)
    return os.fdopen(descriptor, "w+b", buffering)


class NewFile:
    """A file that gets its name when it is complete: at the end of the block, unless that raises.

    Nobody can plant anything in its way: it is written under a name that cannot be guessed, and a symlink at its own
    name is not followed. Without `replace`, anything at that name is left alone, and `FileExistsError` is raised.
    `public` files get the mode that the umask gives.
    """

    def __init__(self, path: str | os.PathLike[str], *, replace: bool = False, public: bool = False) -> None:
        self._path = Path(path).absolute()
        self._replace = replace
        self._public = public
        self._part = self._path.with_name(f".{self._path.name[:50]}.{secrets.token_hex(8)}.part")

    def __enter__(self) -> BinaryIO:
        if not self._replace and os.path.lexists(self._path):  # before any work is done for it
            raise FileExistsError(errno.EEXIST, "it exists already", str(self._path))
        self._file: BinaryIO = open(self._part, "xb") if self._public else open_new(self._part)
        with suppress(OSError):
            before = os.lstat(self._path)
            if stat.S_ISREG(before.st_mode):
                os.fchmod(self._file.fileno(), stat.S_IMODE(before.st_mode))
        return self._file

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if error is not None:
                    return
                self._file.flush()
                os.fsync(self._file.fileno())
            if self._replace:
                os.replace(self._part, self._path)
            else:
                self._link()
        finally:
            self._part.unlink(missing_ok=True)

    def _link(self) -> None:
        try:
            os.link(self._part, self._path)
        except OSError as error:
            if error.errno not in UNLINKABLE:
                raise
            if os.path.lexists(self._path):
                raise FileExistsError(errno.EEXIST, "it exists already", str(self._path)) from None
            os.rename(self._part, self._path)
