"""The embedded store under the suite of all stores."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from onceward.boundary.errors import Unavailable
from onceward.boundary.store import BoundaryStore, NewFact
from onceward.boundary.stores import directory, sqlite
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.errors import ConfigurationError
from onceward.testing.boundary import StoreConformance
from onceward.testing.boundary.suite import fact
from tests.support.lost_files import Change, every_harmless_change, every_wal_loss

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


def test_a_writer_whose_rollback_fails_answers_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sqlite._roll_back
    failures: list[str] = []

    def roll_back(cursor: sqlite3.Cursor) -> None:
        if cursor.connection.in_transaction and len(failures) < 2:
            failures.append("rollback")
            raise sqlite3.OperationalError("disk I/O error")
        real(cursor)

    def fail(cursor: sqlite3.Cursor) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async def main() -> None:
        store = SqliteBoundaryStore(tmp_path)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(store._through_writer(sqlite.Write(None, fail)), 20)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(store.append(fact("m1")), 20)
        assert (await asyncio.wait_for(store.append(fact("m2")), 20)).offset == 1
        await store.close()
        store = SqliteBoundaryStore(tmp_path)
        assert len(await store.read(0, 10)) == 1
        await store.close()

    monkeypatch.setattr(sqlite, "_roll_back", roll_back)
    asyncio.run(main())
    assert len(failures) == 2


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
        log.execute(directory.SCHEMA[0])
        plan = [row[3] for row in log.execute(f'EXPLAIN QUERY PLAN SELECT {end}("offset") FROM facts')]
    assert plan == ["SEARCH facts"]


@pytest.mark.req("CN-04")
@pytest.mark.parametrize("value", ["'soon'", "CAST(x'ff00' AS TEXT)", "x'00'", "1.5"])
@pytest.mark.parametrize("change", ["facts SET record", "facts SET appended_at", "cursors SET position"])
def test_no_value_that_another_program_wrote_stops_a_read(tmp_path: Path, change: str, value: str) -> None:
    async def body() -> None:
        store = SqliteBoundaryStore(tmp_path)
        facts = [NewFact(f"m-{n}", b"digest", b"record", "stream") for n in range(2)]
        await store.append_all(facts)
        await store.advance("reader", 1)
        with closing(sqlite3.connect(tmp_path / "boundary.db")) as database, database:
            database.execute(f"UPDATE {change} = {value}")
        records = await store.read(0, 10)
        assert [(offset, type(record), type(at)) for offset, record, at in records] == [
            (1, bytes, int),
            (2, bytes, int),
        ]
        assert isinstance(await store.position("reader", create=False), int)
        assert [each.name for each in await store.cursors()] == ["reader"]
        await store.close()

    asyncio.run(body())


@pytest.mark.req("RN-08")
@every_wal_loss
def test_a_lost_log_takes_no_fact_and_is_not_ready(tmp_path: Path, lose: Change) -> None:
    async def body() -> None:
        store = SqliteBoundaryStore(tmp_path / "data")
        await store.append(NewFact("a", b"digest", b"record"))
        lose(tmp_path / "data" / "boundary.db")
        for call in (
            store.append(NewFact("b", b"digest", b"record")),
            store.append_all([NewFact("c", b"digest", b"record")]),
            store.advance("reader", 1),
            store.expire({"operational": 0}),
            store.read(0, 10),
            store.bounds(),
            store.size(),
            store.cursors(),
            store.position("reader", create=False),
        ):
            with pytest.raises(Unavailable, match=r"boundary\.db.* (deleted|replaced|emptied|cut)"):
                await call
        await store.close()

    asyncio.run(body())


@pytest.mark.req("RN-08")
@every_harmless_change
def test_other_changes_of_the_log_are_no_loss(tmp_path: Path, change: Change) -> None:
    async def body() -> None:
        store = SqliteBoundaryStore(tmp_path)
        await store.append(NewFact("a", b"digest", b"record"))
        change(tmp_path / "boundary.db")
        assert (await store.append(NewFact("b", b"digest", b"record"))).offset == 2
        await store.close()

    asyncio.run(body())


@pytest.mark.req("RN-08")
def test_a_log_that_is_put_back_goes_on_where_it_was(tmp_path: Path) -> None:
    async def body() -> None:
        store = SqliteBoundaryStore(tmp_path)
        path = tmp_path / "boundary.db"
        await store.append(NewFact("a", b"digest", b"record"))
        path.rename(tmp_path / "away")
        with pytest.raises(Unavailable):
            await store.append(NewFact("b", b"digest", b"record"))
        (tmp_path / "away").rename(path)
        assert (await store.append(NewFact("b", b"digest", b"record"))).offset == 2
        await store.close()

    asyncio.run(body())


@pytest.mark.req("RN-08")
def test_objects_of_a_lost_directory_are_not_said_to_be_missing(tmp_path: Path) -> None:
    async def body() -> None:
        store = SqliteBoundaryStore(tmp_path / "data")
        shutil.rmtree(tmp_path / "data")
        with pytest.raises(Unavailable, match=r"objects/\w+ was deleted or moved"):
            await store.objects.head("bucket", "key")
        await store.close()

    asyncio.run(body())
