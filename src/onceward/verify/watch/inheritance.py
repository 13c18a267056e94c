"""What a child inherits from its parent and must not use: open connections and files.

A client from the import of a module would share its connection with the parent and all other children. So connections
are cut: a client that notices opens a new one, which is seen. Files that are open for writing are replaced by empty
ones in memory, which show whether a handler wrote to them; its writes do not reach the real file.
"""

from __future__ import annotations

import fcntl
import gc
import io
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from sqlalchemy import Engine

from onceward.verify.watch import intrusions

LOG = ".log"
"""How the name of a file ends that any code may write to, through whatever library."""
_cut: int | None = None
"""The inode of what stands for all connections that were cut."""
_peers: dict[int, Any] = {}
_replaced: dict[int, tuple[str, int]] = {}
"""Files that were replaced, by number: the path, and the inode of the replacement."""
_engines: list[Engine] = []
_writers: list[Any] = []
"""Objects that write to files, and may keep what is written for a while."""
_frozen: list[Any] = []
"""Those of both that are frozen: the garbage collector lists only the others."""


class _Mark:
    """Made after the look at frozen objects. As soon as it is frozen itself, there are new ones."""


_mark: _Mark | None = None


def preload() -> None:
    """Find everything that writes to files or has a pool of connections. In the parent, once for all children."""
    found = _wanted()
    if not any(each is _mark for each in found):
        found = _look_at_frozen()
    found += _frozen
    _engines[:] = [each for each in found if isinstance(each, Engine) and each.dialect.name != "sqlite"]
    _writers[:] = [each for each in found if isinstance(each, io.IOBase)]


def _look_at_frozen() -> list[Any]:
    """Seldom: to look writes to all memory, which a fork then copies."""
    global _mark
    if gc.get_freeze_count():
        gc.unfreeze()
        _frozen[:] = _wanted()
        gc.freeze()
    _mark = _Mark()
    return _wanted()


def _wanted() -> list[Any]:
    """In one pass, by type: there may be a million objects."""
    kinds = {io.TextIOWrapper, io.BufferedWriter, _Mark, *_with_subclasses(Engine)}
    return [each for each in gc.get_objects() if type(each) in kinds]


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def install() -> None:
    """Let go of the parent's connections and files."""
    global _cut
    end, other = socket.socketpair()
    other.close()
    _cut = os.fstat(end.fileno()).st_ino
    for number in _open_files():
        peer = _peer(number)
        if peer:
            _peers[number] = peer
            os.dup2(end.fileno(), number)
    end.close()
    for engine in _engines:
        engine.dispose(close=False)  # SQLAlchemy would not notice that they are cut
    if hasattr(os, "memfd_create"):
        _replace_files()


def peer_of(connection: socket.socket) -> Any:
    """Where it leads, or led before it was cut; nothing if it stays in this process."""
    number = connection.fileno()
    is_cut = number in _peers and os.fstat(number).st_ino == _cut
    return _peers[number] if is_cut else connection.getpeername()


def note_writes() -> None:
    """Note what has been written to files of the parent, unless the running step may."""
    _flush()
    for number, (path, inode) in _replaced.items():
        with suppress(OSError):  # closed
            found = os.fstat(number)
            if found.st_ino == inode and found.st_size:
                os.ftruncate(number, 0)
                intrusions.note(f"wrote to the file {path!r:.200}, which was open already,", None)


def _replace_files() -> None:
    for number in _open_files():
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            writes = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            if writes and stat.S_ISREG(os.fstat(number).st_mode) and not path.endswith(LOG):
                _replaced[number] = (path, 0)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in _replaced:
        os.dup2(nothing, number)
    _flush()  # of what the parent wrote
    os.close(nothing)
    for number, (path, _) in _replaced.items():
        empty = os.memfd_create("onceward-verification")
        os.dup2(empty, number)
        os.close(empty)
        _replaced[number] = (path, os.fstat(number).st_ino)


def _flush() -> None:
    for each in _writers if _replaced else ():
        with suppress(OSError, ValueError):  # closed, or not a file
            if each.fileno() in _replaced:
                each.flush()


def _open_files() -> Iterator[int]:
    for name in os.listdir("/dev/fd"):
        number = int(name)
        if number > 2:
            yield number


def _peer(number: int) -> Any:
    """The other end of a connected socket; nothing for other files and for pairs."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with socket.socket(fileno=os.dup(number)) as connection:
                return connection.getpeername()
    return None
