"""Connections of sqlite3 and psycopg on the transaction of the inbox: the driver's own, without what would end it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

from onceward.db.errors import SessionError
from onceward.db.guests.connection import AT_RETURN, RAISE
from onceward.db.guests.guest import ENDED, Guest, Kind
from onceward.db.statement import refusal

INSTEAD = {
    "commit": AT_RETURN,
    "rollback": RAISE,
    "close": "the connection is the inbox's, which closes it; remove the call",
    "executescript": "it commits before it runs; run each statement with execute()",
}
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
STATEMENTS = ("execute", "executemany")


class DriverGuest(Guest):
    """A driver's connection, in a savepoint that must still be there when the handler has returned."""

    def __init__(self, session: Any, kind: Kind) -> None:
        super().__init__(session, kind)
        self.given = LentDriver(self)
        self._driver: Any = None

    def enter(self) -> None:
        lent = self.connection()
        lent.begin_nested()
        self._driver = lent.connection.driver_connection

    @property
    def driver(self) -> Any:
        if self.ended:
            raise SessionError(ENDED.format(what=f"this {self.kind.name}"))
        return self._driver

    def check(self, query: Any) -> None:
        text = query.as_string(None) if hasattr(query, "as_string") else query
        text = text.decode() if isinstance(text, bytes) else str(text)
        why = refusal(text, "sqlite" if self.kind.family == "sqlite3" else "postgresql")
        if why is not None:
            raise SessionError(why)

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
        return getattr(self._object, name)


class LentCursor(Lent):
    """A cursor of a lent connection."""

    def __init__(self, guest: DriverGuest, real: Any, owner: LentDriver) -> None:
        super().__init__(guest, real)
        self.connection = owner

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

    row_factory: Any = None
    """For its own cursors. The driver's connection keeps the one that the pool expects."""

    @property
    def _object(self) -> Any:
        return self._guest.driver

    def cursor(self, *args: Any, **kwargs: Any) -> LentCursor:
        real = self._object.cursor(*args, **kwargs)
        if self.row_factory is not None and "row_factory" not in kwargs:
            real.row_factory = self.row_factory
        return LentCursor(self._guest, real, self)

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return self.cursor().execute(query, *args, **kwargs)

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return self.cursor().executemany(query, *args, **kwargs)

    def transaction(self, *_: Any, **__: Any) -> Any:
        """psycopg's block that may fail alone: a savepoint."""
        return _block_async(self._guest) if self._guest.kind.asynchronous else _block(self._guest)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("_guest", "_real", "row_factory"):
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


@contextmanager
def _block(guest: DriverGuest) -> Iterator[None]:
    with guest.connection().begin_nested():
        yield


@asynccontextmanager
async def _block_async(guest: DriverGuest) -> AsyncIterator[None]:
    from sqlalchemy.util import greenlet_spawn

    nested = await greenlet_spawn(lambda: guest.connection().begin_nested())
    try:
        yield
    except BaseException:
        await greenlet_spawn(nested.rollback)
        raise
    await greenlet_spawn(nested.commit)
