"""Offsets on PostgreSQL: in commit order, without gaps, from several servers at once (D-18)."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from contextlib import closing

import psycopg
import pytest

from onceward.boundary.errors import ConflictingDuplicate, Unavailable
from onceward.boundary.model import Appended
from onceward.boundary.store import Bounds
from onceward.boundary.stores.group_commit import MOST_AT_ONCE
from onceward.boundary.stores.postgresql.schema import ROW_BYTES
from onceward.boundary.wire import stored
from onceward.testing.boundary import fact
from tests.support import ROOT
from tests.support.boundary.databases import StorePlace, place
from tests.support.wait import until_async

__all__ = ["place"]

APPENDER = ROOT / "tests" / "crash" / "boundary" / "appender.py"
APPEND_ONE = """
    SELECT "offset" FROM onceward_boundary_append(
        ARRAY[%s], ARRAY['\\x00'::bytea], ARRAY['\\x00'::bytea], ARRAY['operational'], ARRAY[1::bigint],
        ARRAY[NULL::bigint])
"""


def test_a_serial_would_lose_a_fact(place: StorePlace) -> None:
    """Why the store uses no sequence: of two transactions, the one with the later number commits first."""
    place.admin.execute("CREATE TABLE naive (number bigserial, fact text)")

    def numbers_above(cursor: int) -> list[int]:
        return [number for (number,) in place.ask(f"SELECT number FROM naive WHERE number > {cursor}")]

    with closing(psycopg.connect(place.url)) as early, closing(psycopg.connect(place.url)) as late:
        early.execute("INSERT INTO naive (fact) VALUES ('early')")
        late.execute("INSERT INTO naive (fact) VALUES ('late')")
        late.commit()
        cursor = max(numbers_above(0))  # a reader gets it, and confirms
        early.commit()
        late.execute("INSERT INTO naive (fact) VALUES ('rolled back')")
        late.rollback()
        late.execute("INSERT INTO naive (fact) VALUES ('last')")
        late.commit()
    seen = [cursor, *numbers_above(cursor)]
    assert numbers_above(0) == [1, 2, 4], "with a gap for the rollback"
    assert 1 not in seen, "there, but never served"


@pytest.mark.req("BC-16")
@pytest.mark.parametrize(("ends_with", "offset"), [("commit", 2), ("rollback", 1)])
def test_an_append_waits_for_the_one_before_it_to_commit(
    place: StorePlace, ends_with: str, offset: int
) -> None:
    async def main() -> None:
        async with place.opened() as store:
            with closing(psycopg.connect(place.url, application_name="other")) as other:
                assert other.execute(APPEND_ONE, ("early",)).fetchall() == [(1,)]
                late = asyncio.create_task(store.append(fact("late")))
                await until_async(place.waiting_for_a_lock)
                assert await store.read(0, 10) == []
                assert await store.bounds() == Bounds(1, 0)
                getattr(other, ends_with)()
                assert await late == Appended(offset)
            assert [record[0] for record in await store.read(0, 10)] == list(range(1, offset + 1))

    asyncio.run(main())


@pytest.mark.req("BC-16")
def test_a_reader_beside_several_servers_is_given_every_fact_in_its_order(place: StorePlace) -> None:
    count = 250

    async def follow(servers: list[subprocess.Popen[str]]) -> dict[str, int]:
        async with place.opened() as store:
            seen: dict[str, int] = {}
            position = 0
            while len(seen) < count * len(servers):
                records = await store.read(position, 7)
                for record in records:
                    assert record[0] == len(seen) + 1
                    seen[stored(record).message_id] = record[0]
                if records:
                    position = await store.advance("reader", records[-1][0])
                else:
                    assert any(server.poll() is None for server in servers) or await store.read(position, 1)
            return seen

    servers = [
        subprocess.Popen(
            [sys.executable, str(APPENDER), place.url, name, str(count)], stdout=subprocess.PIPE, text=True
        )
        for name in ("a", "b", "c")
    ]
    try:
        seen = asyncio.run(follow(servers))
    finally:
        said = [line.split() for server in servers for line in server.communicate()[0].splitlines()]
    assert {line[1]: int(line[2]) for line in said if line[0] == "appended"} == seen


@pytest.mark.req("BC-15", "BC-16")
def test_two_servers_on_one_database_are_one_boundary(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as one, place.opened() as two:
            both = itertools.cycle((one, two))
            appended = await asyncio.gather(
                *(next(both).append(fact(f"m{number}", "x")) for number in range(200)),
                *(next(both).append(fact(f"m{number}", "x")) for number in range(0, 200, 3)),
            )
            assert sorted(each.offset for each in appended if not each.duplicate) == list(range(1, 201))
            assert appended[0].offset == appended[200].offset
            outcomes = await asyncio.gather(
                *(next(both).append(fact("contested", str(number))) for number in range(20)),
                return_exceptions=True,
            )
            assert outcomes.count(Appended(201)) == 1
            assert sum(isinstance(each, ConflictingDuplicate) for each in outcomes) == 19
            assert await one.read(0, 1000) == await two.read(0, 1000)
            await one.advance("c", 5)
            assert await two.position("c", create=True) == 5
            assert sorted(await asyncio.gather(one.advance("c", 9), two.advance("c", 7)))[-1] == 9
            assert await two.advance("c", 6) == 9
            assert await one.cursors() == await two.cursors()

    asyncio.run(main())


def test_confirms_of_many_names_from_two_servers_do_not_wait_for_each_other_for_ever(
    place: StorePlace,
) -> None:
    async def main() -> None:
        async with place.opened() as one, place.opened() as two:
            names = [f"c{number}" for number in range(300)]
            for offset in range(1, 11):
                await asyncio.gather(
                    *(one.advance(name, offset) for name in names),
                    *(two.advance(name, offset) for name in reversed(names)),
                )
            assert {cursor.offset for cursor in await one.cursors()} == {10}

    asyncio.run(main())


def test_two_servers_that_remove_facts_while_others_append_agree_on_the_size(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as one, place.opened() as two:
            await asyncio.gather(
                *(one.append(fact(f"old{n}", "x" * n, appended_at=5000 - n)) for n in range(3000))
            )
            expired, dropped, *_ = await asyncio.gather(
                one.expire({"operational": 6000}),
                two.drop(3000),
                *((one, two)[n % 2].append(fact(f"new{n}", "x" * n)) for n in range(300)),
            )
            assert expired + dropped == 3000
            assert await one.bounds() == Bounds(3001, 3300)
            [(bytes_left,)] = place.ask(
                f"SELECT sum(octet_length(record) + {ROW_BYTES}) FROM onceward_boundary_facts"
            )
            assert await one.size() == await two.size() == bytes_left
            await one.drop(3300)
            assert await two.size() == 0

    asyncio.run(main())


def test_a_server_does_not_wait_for_facts_that_another_is_removing(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            for number in range(3):
                await store.append(fact(f"m{number}", appended_at=1000))
            with closing(psycopg.connect(place.url, application_name="other")) as other:
                other.execute('DELETE FROM onceward_boundary_facts WHERE "offset" = 1')
                assert await store.drop(2) == 1
                assert await store.expire({"operational": 2000}) == 1
                other.commit()
            assert await store.bounds() == Bounds(4, 3)

    asyncio.run(main())


def test_of_many_in_order_none_is_written_behind_one_that_could_not_be(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            given = [fact(f"m{number}") for number in range(MOST_AT_ONCE * 3)]
            given[MOST_AT_ONCE + 5] = fact("what PostgreSQL cannot take: \0")
            with pytest.raises(Unavailable):
                await store.append_all(given)
            names = [stored(record).message_id for record in await store.read(0, MOST_AT_ONCE * 3)]
            assert names == [each.message_id for each in given[:MOST_AT_ONCE]]

    asyncio.run(main())


def test_appends_that_wait_at_the_same_time_share_a_commit(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            await asyncio.gather(*(store.append(fact(f"m{number}")) for number in range(500)))

    asyncio.run(main())
    [(transactions,)] = place.ask("SELECT count(DISTINCT xmin::text) FROM onceward_boundary_facts")
    assert transactions <= 2


def test_large_facts_do_not_all_go_in_one_transaction(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            await asyncio.gather(*(store.append(fact(f"m{number}", "x" * 3_000_000)) for number in range(6)))

    asyncio.run(main())
    assert place.ask("SELECT count(*) FROM onceward_boundary_facts GROUP BY xmin::text") == [(3,), (3,)]


def test_no_query_reads_a_table_through_whatever_its_plan_was_when_it_was_small(place: StorePlace) -> None:
    def scans() -> int:
        place.wait_until_left()  # a connection reports its figures when it ends
        [(count,)] = place.ask(
            "SELECT seq_scan FROM pg_stat_user_tables "
            f"WHERE schemaname = '{place.name}' AND relname = 'onceward_boundary_facts'"
        )
        return int(count)

    async def main(count: int) -> None:
        async with place.opened() as store:
            for number in range(count):
                await store.append(fact(f"m{number}", appended_at=1000))
                await store.append(fact(f"m{number}", appended_at=1000))
                await store.read(number, 10)
                await store.bounds()
                await store.expire({"audit": 1001})
                await store.drop(0)

    asyncio.run(main(0))
    before = scans()
    asyncio.run(main(20))
    assert scans() == before
