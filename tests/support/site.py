"""The place of a crash test: a folder, a database beside it, and processes that may die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import NullPool, create_engine, text

from onceward.connectors import SqliteConnector
from tests.support.fork_server import FORKED
from tests.support.schema import new_schema

PATIENCE = 60.0
"""Seconds. What takes so long does not happen."""


def exit_code(process: ForkServerProcess) -> int | None:
    """When it has ended."""
    process.join(PATIENCE)
    return process.exitcode


class Site:
    def __init__(self, folder: Path, url: str, connect_args: dict[str, Any]) -> None:
        self.folder = folder
        self.url = url
        self.connect_args = connect_args
        self.is_sqlite = url.startswith("sqlite")
        self.engine = create_engine(url, connect_args=connect_args, poolclass=NullPool)
        self._queues: dict[str, SqliteConnector] = {}
        self._processes: list[ForkServerProcess] = []

    @classmethod
    def on(cls, request: pytest.FixtureRequest, folder: Path) -> AbstractContextManager[Self]:
        """A new one on the database that the fixture's parameter names."""
        if request.param == "sqlite":
            return cls.on_sqlite(folder)
        return cls.on_postgresql(folder, request.getfixturevalue("postgres_url"))

    @classmethod
    @contextmanager
    def on_sqlite(cls, folder: Path) -> Iterator[Self]:
        with closing(cls(folder, f"sqlite:///{folder}/business.db", {"timeout": 30.0})) as made:
            made.set_up()
            yield made

    @classmethod
    @contextmanager
    def on_postgresql(cls, folder: Path, url: str) -> Iterator[Self]:
        """In a schema of its own."""
        with new_schema(url) as schema, closing(cls(folder, url, schema.connect_args)) as made:
            made.set_up()
            yield made

    def set_up(self) -> None:
        """Make the tables."""

    def queue(self, name: str = "queue.db") -> SqliteConnector:
        if name not in self._queues:
            self._queues[name] = SqliteConnector(self.folder / name)
        return self._queues[name]

    def fork(self, function: Callable[..., None], *args: Any) -> ForkServerProcess:
        """It is killed in the end if it still runs then."""
        process = FORKED.Process(target=function, args=args)
        process.start()
        self._processes.append(process)
        return process

    def do(self, statement: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement))

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(PATIENCE)
            process.close()
        for queue in self._queues.values():
            queue.close()
