"""The calls of a process to its database that have no answer yet, to notice a server that is frozen or out of reach.

Such a server breaks no connection, so no call fails: it only takes long. So may a statement of a handler. What tells
the two apart is whether the server answers another connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sqlalchemy import URL, Connection, Engine, event

_WATCHED = "onceward_watches"
"""Attribute of an engine whose calls are watched."""
PROBE_AGAIN = 10.0
"""Seconds until the server is asked again, if it answers while a call takes long."""


class DatabaseServer(NamedTuple):
    """Where a server listens, by the URL of a database on it."""

    host: str
    port: str

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"


def server_of(url: URL) -> DatabaseServer:
    host, port = (url.query.get(name) for name in ("host", "port"))
    return DatabaseServer(str(host or url.host or "localhost"), str(port or url.port or 5432))


class DatabaseCalls:
    """When each call without an answer began: connecting, statements, commits and rollbacks."""

    def __init__(self) -> None:
        self._began: dict[Any, float] = {}
        self.servers: dict[DatabaseServer, URL] = {}
        """Those whose calls are watched, each with a URL of an engine."""

    def watch(self, engine: Engine) -> None:
        """Watch the calls of an engine, if its database has a server."""
        if engine.dialect.name == "sqlite":
            return
        setattr(engine, _WATCHED, True)
        self.servers = {
            server_of(engine.url): engine.url,
            **self.servers,
        }  # another thread may just go through them
        self.watch_connecting(engine)
        event.listen(engine, "before_cursor_execute", lambda conn, *_: self._begin(_key(conn)))
        event.listen(engine, "after_cursor_execute", lambda conn, *_: self._end(_key(conn)))
        event.listen(engine, "handle_error", self._failed)
        event.listen(engine, "commit", lambda conn: self._begin(_key(conn)))
        event.listen(engine, "rollback", lambda conn: self._begin(_key(conn)))
        event.listen(engine.pool, "checkin", lambda driver, _: self._end(id(driver)))
        event.listen(engine.pool, "close", lambda driver, _: self._end(id(driver)))
        event.listen(engine.pool, "invalidate", lambda driver, *_: self._end(id(driver)))

    def watch_connecting(self, engine: Engine) -> Engine:
        """Watch only when an engine connects, and return it."""
        event.listen(engine, "do_connect", self._connect)
        return engine

    def oldest(self) -> float | None:
        """Return for how many seconds the oldest has had no answer."""
        began = list(self._began.values())
        return time.monotonic() - min(began) if began else None

    def connecting(self) -> float | None:
        """Return for how many seconds the oldest try to connect has had no answer."""
        began = [at for key, at in list(self._began.items()) if isinstance(key, tuple)]
        return time.monotonic() - min(began) if began else None

    def call(self, connection: Connection) -> UnseenCall:
        """A block that makes a call on this connection of which SQLAlchemy does not know."""
        return self.call_on(connection.connection.dbapi_connection)

    def call_on(self, driver: Any) -> UnseenCall:
        """The same, by the connection of the driver."""
        return UnseenCall(self._began, id(driver))

    def watches(self, engine: Engine) -> bool:
        return getattr(
            engine, _WATCHED, False
        )  # asked for every statement: a set of weak references takes longer

    def _begin(self, key: Any) -> None:
        if key is not None:
            self._began[key] = time.monotonic()

    def _end(self, key: Any) -> None:
        self._began.pop(key, None)

    def _failed(self, context: Any) -> None:
        if context.connection is not None:
            self._end(_key(context.connection))

    def _connect(self, dialect: Any, record: Any, arguments: Any, options: Any) -> Any:
        key = ("connect", threading.get_ident(), id(record))
        self._begin(key)
        try:
            return dialect.connect(*arguments, **options)
        finally:
            self._end(key)


class UnseenCall:
    """A block with a call that is not one of SQLAlchemy's. A generator would take three times as long."""

    __slots__ = ("_began", "_key")

    def __init__(self, began: dict[Any, float], key: int) -> None:
        self._began = began
        self._key = key

    def __enter__(self) -> None:
        self._began[self._key] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._began.pop(self._key, None)


CALLS = DatabaseCalls()
"""Of all engines that onceward opens in this process."""


class AnswerWatch:
    """Asks the server in a thread of its own when a call has had no answer for `patience` seconds."""

    def __init__(
        self,
        ask: Callable[[], None],
        patience: float,
        calls: DatabaseCalls = CALLS,
        *,
        what: str = "the database",
    ) -> None:
        """`ask` opens a connection, and raises if the server, `what`, does not answer in time."""
        self._ask = ask
        self._patience = patience
        self._calls = calls
        self._what = what
        self._next = 0.0
        self._asking: threading.Thread | None = None
        self.problem: str | None = None
        """Why the database is not ready, if it is not."""

    def look(self) -> None:
        """Call it about once a second. Never waits."""
        if self._asking is not None and self._asking.is_alive():
            return
        age = self._calls.oldest()
        if self.problem is None and (age is None or age < self._patience or time.monotonic() < self._next):
            return
        self._asking = threading.Thread(target=self._run, daemon=True, name="onceward-database-watch")
        self._asking.start()

    def _run(self) -> None:
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001  any error is the answer
            reason = str(error).strip().partition("\n")[0]
            self.problem = f"{self._what} does not answer: {reason}"
        else:
            self.problem = None
            self._next = time.monotonic() + PROBE_AGAIN


def _key(connection: Any) -> int | None:
    """Identify what the pool lends; None if it is broken or given back."""
    if connection.closed or connection.invalidated:
        return None
    return id(connection.connection.dbapi_connection)
