"""Sessions of both kinds on real databases behind the same calls: a test takes `database` and runs on each.

In asyncio, each call runs to its end on the fixture's event loop, so tests read the same.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.db import AsyncDbSession, DbSession
from onceward.db.engines import connect_arguments
from tests.support.schema import new_schema


class Blocking:
    """An `AsyncDbSession` with blocking methods."""

    def __init__(self, session: AsyncDbSession, run: Callable[[Any], Any]) -> None:
        self._session = session
        self._await = run

    def __enter__(self) -> Blocking:
        self._await(self._session.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._await(self._session.__aexit__(kind, error, trace))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._session, name)
        if inspect.iscoroutinefunction(value):
            return lambda *args, **kwargs: self._await(value(*args, **kwargs))
        return value


class Database:
    def __init__(self, name: str, mode: str, url: str, **connect_args: Any) -> None:
        self.name = name
        self.asynchronous = mode == "asyncio"
        self.url = url
        self.connect_args = connect_args
        self._runner = asyncio.Runner()
        self._engines: list[Any] = []
        self.default = self.engine()

    @property
    def is_sqlite(self) -> bool:
        return self.name == "sqlite"

    def engine(
        self, url: str | None = None, *, connect_args: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        url = url or self.url
        arguments = self.connect_args | (connect_args or {})
        if self.asynchronous:
            url = url.replace("sqlite://", "sqlite+aiosqlite://", 1)
            arguments = connect_arguments(make_url(url), asynchronous=True) | arguments  # as an app's
            made: Any = create_async_engine(url, connect_args=arguments, **options)
        else:
            made = create_engine(url, connect_args=arguments, **options)
        self._engines.append(made)
        return made

    def session(self, engine: Any = None) -> Any:
        engine = engine or self.default
        return Blocking(AsyncDbSession(engine), self.run) if self.asynchronous else DbSession(engine)

    def run(self, awaitable: Any) -> Any:
        return self._runner.run(self._awaited(awaitable))

    async def _awaited(self, awaitable: Any) -> Any:
        return await awaitable

    def plain(self, engine: Any = None) -> Engine:
        """The synchronous engine, for its events and its pool."""
        engine = engine or self.default
        return engine.sync_engine if self.asynchronous else engine

    def do(self, *statements: str) -> None:
        """Run each in its own session."""
        for statement in statements:
            with self.session() as session:
                session.execute(statement)

    def scalar(self, query: str) -> Any:
        """What another transaction sees."""
        with self.session() as session:
            return session.execute_scalar(query)

    def read_without_session(self, query: str) -> Any:
        if not self.asynchronous:
            with self.default.connect() as connection:
                return connection.scalar(text(query))

        async def read() -> Any:
            async with self.default.connect() as connection:
                return await connection.scalar(text(query))

        return self.run(read())

    def close(self) -> None:
        for engine in self._engines:
            if self.asynchronous:
                self.run(engine.dispose())
            else:
                engine.dispose()
        self._runner.close()


KINDS = [(name, mode) for name in ("sqlite", "postgresql") for mode in ("threads", "asyncio")]


@pytest.fixture(params=KINDS, ids=[f"{name}-{mode}" for name, mode in KINDS])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database."""
    name, mode = request.param
    if name == "sqlite":
        yield from _closing(Database(name, mode, f"sqlite:///{tmp_path}/test.db"))
    else:
        yield from _on_postgresql(mode, request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["threads", "asyncio"])
def sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    yield from _closing(Database("sqlite", request.param, f"sqlite:///{tmp_path}/test.db"))


@pytest.fixture(params=["threads", "asyncio"])
def postgresql(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[Database]:
    yield from _on_postgresql(request.param, postgres_url)


def _on_postgresql(mode: str, url: str) -> Iterator[Database]:
    with new_schema(url) as schema:
        yield from _closing(Database("postgresql", mode, url, **schema.connect_args))


def _closing(database: Database) -> Iterator[Database]:
    try:
        yield database
    finally:
        database.close()
