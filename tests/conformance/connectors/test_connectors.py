"""The connectors of this package, under the suite that third parties use."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onceward.connectors import (
    AsyncConnector,
    AsyncMemoryConnector,
    AsyncSqliteConnector,
    Connector,
    MemoryConnector,
    SqliteConnector,
)
from onceward.testing.connectors import ConnectorConformance


def put_raw(connector: Any, body: bytes) -> None:
    """Below the connector, where no codec checks anything."""
    store = getattr(connector, "_wire", connector)._store
    with store.transaction(1.0):
        store.append([body], 0.0)


class TestMemoryConnector(ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> Connector:
        return MemoryConnector(clock=clock, **settings)

    def make_waiting(self, **settings: Any) -> Connector:
        return MemoryConnector(**settings)

    put_raw = staticmethod(put_raw)


class TestAsyncMemoryConnector(ConnectorConformance):
    def make(self, clock: Any, **settings: Any) -> AsyncConnector:
        return AsyncMemoryConnector(clock=clock, **settings)

    def make_waiting(self, **settings: Any) -> AsyncConnector:
        return AsyncMemoryConnector(**settings)

    put_raw = staticmethod(put_raw)


class TestSqliteConnector(ConnectorConformance):
    releases = True

    @pytest.fixture(autouse=True)
    def in_a_new_directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "queue.db"

    def make(self, clock: Any, **settings: Any) -> Connector:
        return SqliteConnector(self.path, clock=clock, **settings)

    def make_waiting(self, **settings: Any) -> Connector:
        return SqliteConnector(self.path, **settings)

    def reopen(self, connector: Connector, clock: Any, **settings: Any) -> Connector:
        return self.make(clock, **settings)

    put_raw = staticmethod(put_raw)


class TestAsyncSqliteConnector(ConnectorConformance):
    releases = True

    @pytest.fixture(autouse=True)
    def in_a_new_directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "queue.db"

    def make(self, clock: Any, **settings: Any) -> AsyncConnector:
        return AsyncSqliteConnector(self.path, clock=clock, **settings)

    def make_waiting(self, **settings: Any) -> AsyncConnector:
        return AsyncSqliteConnector(self.path, **settings)

    def reopen(self, connector: AsyncConnector, clock: Any, **settings: Any) -> AsyncConnector:
        return self.make(clock, **settings)

    put_raw = staticmethod(put_raw)


@pytest.mark.req("PG-11")
class TestNamedSqliteConnector(ConnectorConformance):
    """A queue in the application's database."""

    releases = True

    @pytest.fixture(autouse=True)
    def in_the_database_of_an_application(self, tmp_path: Path) -> None:
        self.path = tmp_path / "shop.db"
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("CREATE TABLE messages (text TEXT)")

    def make(self, clock: Any, **settings: Any) -> Connector:
        return SqliteConnector(self.path, queue="orders", clock=clock, **settings)

    def reopen(self, connector: Connector, clock: Any, **settings: Any) -> Connector:
        return self.make(clock, **settings)

    put_raw = staticmethod(put_raw)
