"""What CPython does not report: traffic over connections that are open already, and of C libraries; special files.

A connection from an import or an earlier step is open when a handler uses it. psycopg and gRPC open theirs in C.
"""

from __future__ import annotations

import functools
import os
import socket
import ssl
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from onceward.verify.watch import inheritance, intrusions
from onceward.verify.watch.intrusions import SESSIONS

SQLALCHEMY = ("sqlalchemy.",)
_GRPC = ("grpc._channel", "grpc.aio._channel")


def preload() -> None:
    """Import psycopg, if it is installed, before a handler does."""
    with suppress(ImportError):
        import_module("psycopg")


def install() -> None:
    """Note such traffic from now on."""
    for kind, names in (
        (socket.socket, ("send", "sendall", "sendfile")),
        (ssl.SSLSocket, ("send", "sendall")),
    ):
        for name in names:
            setattr(kind, name, _noting_peer(getattr(kind, name)))
    for name in ("mkfifo", "mknod"):
        setattr(os, name, _noting("created a special file", getattr(os, name)))
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None:
        base: Any = psycopg.BaseConnection  # not `connect`, of which other modules have copies
        through = (*SESSIONS, *SQLALCHEMY)  # their statements are watched, one by one
        connect = _noting("opened another database connection", base._connect_gen.__func__, through)
        base._connect_gen = classmethod(connect)
        for cursor in (psycopg.Cursor, psycopg.AsyncCursor):
            for name in ("execute", "executemany", "copy", "stream"):
                setattr(cursor, name, _noting_statement(getattr(cursor, name)))
    for module in filter(None, map(sys.modules.get, _GRPC)):
        for name, kind in vars(module).items():
            for call in ("__call__", "with_call", "future") if name.endswith("MultiCallable") else ():
                if call in vars(kind):
                    setattr(kind, call, _noting("made a gRPC call", vars(kind)[call]))


def _noting(what: str, real: Any, not_through: tuple[str, ...] = ()) -> Any:
    def note_and_call(*args: Any, **more: Any) -> Any:
        intrusions.note(what, sys._getframe(1), not_through=not_through)
        return real(*args, **more)

    return note_and_call


def _noting_statement(run: Any) -> Any:
    @functools.wraps(run)
    def note_and_run(cursor: Any, query: Any, *args: Any, **more: Any) -> Any:
        statement, frame = _as_text(query, cursor), sys._getframe(1)
        intrusions.note_statement(statement, frame, SQLALCHEMY)
        if not intrusions.is_through(frame, SQLALCHEMY):
            values = args[0] if args else more.get("params", more.get("params_seq"))
            intrusions.note_escape(statement, values, frame, lambda: _foreign_tables(cursor))
        return run(cursor, query, *args, **more)

    return note_and_run


def _foreign_tables(cursor: Any) -> set[str]:
    """Asked below the cursor, which may be one of asyncio."""
    found = cursor.connection.pgconn.exec_(intrusions.FOREIGN_TABLES.encode())
    return {found.get_value(row, 0).decode() for row in range(found.ntuples)}


def _as_text(query: Any, cursor: Any) -> str:
    """A query of psycopg: a string, bytes, or a composed one."""
    if hasattr(query, "as_string"):
        return str(query.as_string(cursor))
    return query.decode(errors="replace") if isinstance(query, bytes) else str(query)


def _noting_peer(real: Any) -> Any:
    def note_and_send(self: socket.socket, *args: Any, **more: Any) -> Any:
        if intrusions.is_watched() and self.fileno() not in intrusions.connected:
            with suppress(OSError):  # it is not connected; `real` says so
                peer = inheritance.peer_of(self)
                if peer:  # otherwise it is one half of a pair, such as an event loop's
                    what = f"sent data to {peer!r:.200} over a connection that was open already"
                    intrusions.note(what, sys._getframe(1))
        return real(self, *args, **more)

    return note_and_send
