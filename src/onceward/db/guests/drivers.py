"""Connections of sqlite3 and psycopg on the transaction of the inbox: the driver's own, without what would end it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from onceward.db.errors import SessionError
from onceward.db.guests.connection import AT_RETURN, RAISE
from onceward.db.guests.guest import ENDED, Guest, Kind

INSTEAD = {
    "commit": AT_RETURN,
    "rollback": RAISE,
    "close": "the connection is the inbox's, which closes it; remove the call",
    "executescript": "it commits before it runs; run each statement with execute()",
}
OWN_CALLS = (
    "only calls of the connection and of its cursors belong to this event; use its execute() or cursor()"
)
REFUSED = (
    *INSTEAD,
    *("set_autocommit", "set_isolation_level", "set_read_only", "set_deferrable"),
    *("tpc_begin", "tpc_prepare", "tpc_commit", "tpc_rollback", "pipeline", "backup", "interrupt", "cancel"),
    *(
        "add_notice_handler",
        "add_notify_handler",
        "set_authorizer",
        "set_progress_handler",
        "set_trace_callback",
    ),
    *("enable_load_extension", "load_extension", "deserialize", "setconfig", "setlimit"),
)
"""What would end the transaction, or outlive it."""
INNER = ("lock", "wait")
"""With its private names, what psycopg's own classes use to run a statement on a connection that they are given."""


class DriverGuest(Guest):
    """A driver's connection, in a savepoint that must still be there when the handler has returned."""

    def __init__(self, session: Any, kind: Kind) -> None:
        super().__init__(session, kind)
        self.given = LentDriver(self)
        self._driver: Any = None

    def enter(self) -> None:
        lent = self.connection()
        lent.begin_nested()
        self._driver = lent.real.connection.driver_connection

    @property
    def driver(self) -> Any:
        if self.ended:
            raise SessionError(ENDED.format(what=f"this {self.kind.name}"))
        return self._driver

    def check(self, query: Any) -> None:
        text = query.as_string(None) if hasattr(query, "as_string") else query
        text = text.decode() if isinstance(text, bytes) else str(text)
        self.check_text(text, "sqlite" if self.kind.family == "sqlite3" else "postgresql")

    def call(self, query: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A statement of the driver, as an operation of the session."""
        self.check(query)
        if not self.kind.asynchronous:
            return self.statement(query, lambda: function(query, *args, **kwargs))
        return self._call_async(query, function, *args, **kwargs)

    async def _call_async(self, query: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        from sqlalchemy.util import await_only, greenlet_spawn

        def call() -> Any:
            return await_only(function(query, *args, **kwargs))

        return await greenlet_spawn(self.statement, query, call)


class Lent:
    """Stands for an object of a driver: also for `isinstance`."""

    def __init__(self, guest: DriverGuest, real: Any = None) -> None:
        self._guest = guest
        self._real = real

    @property
    def _object(self) -> Any:
        return self._real

    @property
    def __class__(self) -> type[Any]:
        return type(self._object)

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TypeError("the class of a lent object is its driver's")

    def __getattr__(self, name: str) -> Any:
        guest = self._guest
        if name in REFUSED:
            instead = INSTEAD.get(name, "it would outlive the transaction of this event; remove the call")
            return lambda *_, **__: guest.refuse(f"{name}()", instead)
        found = getattr(self._object, name)
        if name in INNER or (name.startswith("_") and not name.endswith("__")):
            guest.refuse(f"{name} of the connection", OWN_CALLS)
        return found


class LentCursor(Lent):
    """A cursor of a lent connection."""

    def __init__(self, guest: DriverGuest, real: Any, owner: LentDriver) -> None:
        super().__init__(guest, real)
        self.connection = owner

    def __setattr__(self, name: str, value: Any) -> None:
        """What is set, such as `row_factory`, is the cursor's own."""
        if name in ("_guest", "_real", "connection"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._real, name, value)

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._real.execute, query, *args, **kwargs)

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._real.executemany, query, *args, **kwargs)

    def _run(self, function: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        called = self._guest.call(query, function, *args, **kwargs)
        if not self._guest.kind.asynchronous:
            return self

        async def ran() -> Any:
            await called
            return self

        return ran()

    def copy(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """psycopg's block of COPY. Its statement is an operation of the session, with what it transfers."""
        if self._guest.kind.asynchronous:
            return _opened(self._begun_async(self._real.copy, query, *args, **kwargs))
        return self._begun(self._real.copy, query, *args, **kwargs)

    def stream(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """psycopg's rows one by one."""
        if self._guest.kind.asynchronous:
            return _each(self._begun_async(self._real.stream, query, *args, **kwargs))
        return self._begun(self._real.stream, query, *args, **kwargs)

    def _begun(self, function: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        """What the user goes on with, a block or an iterator; it has not run when the operation ends."""
        (begun,) = self._guest.call(
            query, lambda *given, **more: (function(*given, **more),), *args, **kwargs
        )
        return begun

    async def _begun_async(self, function: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        async def begin(*given: Any, **more: Any) -> Any:
            return (function(*given, **more),)

        (begun,) = await self._guest.call(query, begin, *args, **kwargs)
        return begun

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real)

    def __next__(self) -> Any:
        return next(self._real)

    def __aiter__(self) -> AsyncIterator[Any]:
        found: AsyncIterator[Any] = aiter(self._real)
        return found

    def close(self) -> Any:
        return self._real.close()

    def __enter__(self) -> LentCursor:
        return self

    def __exit__(self, *_: object) -> None:
        self._real.close()

    async def __aenter__(self) -> LentCursor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._real.close()


class LentDriver(Lent):
    """A connection of a driver."""

    _rows: Any = None
    """The `row_factory` of its own cursors. The driver's connection keeps the one that the pool expects."""

    @property
    def _object(self) -> Any:
        return self._guest.driver

    @property
    def row_factory(self) -> Any:
        return self._object.row_factory if self._rows is None else self._rows

    @row_factory.setter
    def row_factory(self, factory: Any) -> None:
        self._rows = factory

    def cursor(self, *args: Any, **kwargs: Any) -> LentCursor:
        real = self._object.cursor(*args, **kwargs)
        if self._rows is not None and "row_factory" not in kwargs:
            real.row_factory = self._rows
        self._guest.reads.add(real)
        return LentCursor(self._guest, real, self)

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return self.cursor().execute(query, *args, **kwargs)

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return self.cursor().executemany(query, *args, **kwargs)

    @property
    def adapters(self) -> Any:
        """psycopg's. sqlite3 has none."""
        adapters = self._object.adapters
        from onceward.db.guests.adapters import LentAdapters

        return LentAdapters(adapters, self._guest)

    def transaction(self, savepoint_name: str | None = None, force_rollback: bool = False) -> LentBlock:
        """psycopg's block that may fail alone: a savepoint."""
        return LentBlock(self, self._guest, force_rollback)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_guest", "_real", "_rows", "row_factory"):
            self._guest.refuse(f"setting {name}", "it would outlive this event on the inbox's connection")
        object.__setattr__(self, name, value)

    def __enter__(self) -> NoReturn:
        self._guest.refuse("`with connection:`", AT_RETURN)

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> NoReturn:
        self._guest.refuse("`async with connection:`", AT_RETURN)

    async def __aexit__(self, *_: object) -> None: ...


@asynccontextmanager
async def _opened(begun: Any) -> AsyncIterator[Any]:
    async with await begun as block:
        yield block


async def _each(begun: Any) -> AsyncIterator[Any]:
    async for row in await begun:
        yield row


class LentBlock:
    """psycopg's `transaction()` of a lent connection. It has a name of its own."""

    def __init__(self, connection: LentDriver, guest: DriverGuest, force_rollback: bool) -> None:
        self.connection = connection
        self.force_rollback = force_rollback
        self._guest = guest
        self._nested: Any = None

    def __enter__(self) -> LentBlock:
        self._nested = self._guest.connection().begin_nested()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None and not self.force_rollback:
            self._nested.commit()
            return False
        self._nested.rollback()
        return self._is_asked_for(error)

    async def __aenter__(self) -> LentBlock:
        from sqlalchemy.util import greenlet_spawn

        return await greenlet_spawn(self.__enter__)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        from sqlalchemy.util import greenlet_spawn

        return await greenlet_spawn(self.__exit__, kind, error, trace)

    def _is_asked_for(self, error: BaseException | None) -> bool:
        """Whether code has raised psycopg's `Rollback` for this block, which then swallows it."""
        from psycopg import Rollback

        block: Any = getattr(error, "transaction", None)
        return isinstance(error, Rollback) and (block is None or block is self)
