"""The embedded store under the suite of all stores."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from onceward.boundary.store import BoundaryStore
from onceward.boundary.stores import sqlite
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.errors import ConfigurationError
from onceward.testing.boundary import StoreConformance

_numbers = itertools.count()


class TestSqliteStore(StoreConformance):
    async def open(self) -> BoundaryStore:
        return SqliteBoundaryStore(self.place)

    async def fresh(self) -> BoundaryStore:
        self.place = self.place.parent / f"example-{next(_numbers)}"
        return SqliteBoundaryStore(self.place)

    async def crash(self, store: BoundaryStore) -> BoundaryStore:
        """Open a copy of the files, made while the first store is open: what a machine that dies leaves behind."""
        assert isinstance(store, SqliteBoundaryStore)
        left = self.place.parent / f"left-{next(_numbers)}"
        left.mkdir()
        for name in ("boundary.db", "boundary.db-wal"):
            source = self.place / name
            if source.exists():
                (left / name).write_bytes(source.read_bytes())
        await store.close()
        self.place = left
        return SqliteBoundaryStore(left)

    def test_a_second_server_on_one_directory_is_refused(self) -> None:
        async def body(store: BoundaryStore) -> None:
            with pytest.raises(ConfigurationError, match="another process, such as a server, uses"):
                SqliteBoundaryStore(self.place)

        self.on_store(body)
        self.on_store(lambda store: store.bounds())


def test_a_file_of_a_newer_onceward_is_not_touched(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "boundary.db")) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigurationError, match="newer onceward"):
        SqliteBoundaryStore(tmp_path)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "boundary.db").write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(ConfigurationError, match=r"boundary\.db"):
        SqliteBoundaryStore(tmp_path)


@pytest.mark.parametrize("end", ["min", "max"])
def test_finding_an_end_of_the_log_does_not_go_through_it(tmp_path: Path, end: str) -> None:
    assert f'(SELECT {end}("offset") FROM facts)' in sqlite.BOUNDS
    with closing(sqlite3.connect(tmp_path / "log.db")) as log:
        log.execute(sqlite.SCHEMA[0])
        plan = [row[3] for row in log.execute(f'EXPLAIN QUERY PLAN SELECT {end}("offset") FROM facts')]
    assert plan == ["SEARCH facts"]
