"""Broken connections to PostgreSQL, and opening a store there."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from onceward._time import Moment
from onceward.boundary.errors import QuotaExceeded, Unavailable
from onceward.boundary.model import Appended, Gap
from onceward.boundary.store import Bounds, ObjectQuota
from onceward.boundary.stores.postgresql.connections import PostgreSqlConnections
from onceward.boundary.stores.postgresql.schema import VERSION
from onceward.boundary.stores.postgresql.store import CONNECTIONS, PostgreSqlBoundaryStore
from onceward.errors import ConfigurationError
from onceward.testing.boundary import fact
from tests.support.boundary.databases import StorePlace, place
from tests.support.proxy import TcpProxy, WireFault, proxy_to
from tests.support.wait import until_async

__all__ = ["place"]

# ── broken connections ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-16")
def test_whoever_waits_when_a_connection_breaks_is_refused_and_the_next_is_not(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            await store.append(fact("before"))
            with closing(psycopg.connect(place.url, application_name="other")) as other:
                other.execute("SELECT FROM onceward_boundary_log FOR UPDATE")
                waiting = [asyncio.create_task(store.append(fact(f"m{number}"))) for number in range(5)]
                await until_async(place.waiting_for_a_lock)
                place.kill_connections()
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(each) for each in outcomes] == [Unavailable] * 5
            assert await store.bounds() == Bounds(1, 1)
            assert await store.append(fact("m0")) == Appended(2)

    asyncio.run(main())


def test_connections_that_broke_while_nobody_used_them_cost_nobody_anything(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            for number in range(1, 4):
                await asyncio.gather(store.append(fact(f"m{number}")), store.read(0, 10), store.bounds())
                await store.advance("c", number)
                assert place.kill_connections() >= 3
            assert await store.bounds() == Bounds(1, 3)
            assert await store.position("c", create=False) == 3

    asyncio.run(main())


def test_a_reader_who_goes_away_in_the_middle_does_not_harm_the_others(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            await asyncio.gather(*(store.append(fact(f"m{number}", "x" * 1000)) for number in range(500)))
            readers = [asyncio.create_task(store.read(0, 500)) for _ in range(30)]
            await asyncio.sleep(0.002)
            for reader in readers[::2]:
                reader.cancel()
            pages = await asyncio.gather(*readers, return_exceptions=True)
            assert all(len(page) == 500 for page in pages[1::2] if not isinstance(page, BaseException))
            assert not any(isinstance(page, Exception) for page in pages)
            assert len(await store.read(0, 1000)) == 500

    asyncio.run(main())


@pytest.mark.req("BC-41")
def test_a_canceled_call_does_not_wait_for_a_frozen_server(place: StorePlace) -> None:
    """psycopg's own connection waits for ten seconds, whatever the deadline of the call."""

    async def main() -> None:
        async with place.opened() as store:
            async with store._connections.one() as connection:
                pid = connection.info.backend_pid
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            try:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await store.read(0, 10)
                assert time.monotonic() - began < 4
                assert await store.read(0, 10) == [], "another connection"
            finally:
                os.kill(pid, signal.SIGCONT)
            await until_async(lambda: not place.ask(f"SELECT FROM pg_stat_activity WHERE pid = {pid}"))

    asyncio.run(main())


@pytest.mark.req("BC-41")
def test_connections_that_are_closed_right_after_a_query_was_canceled_are_closed(place: StorePlace) -> None:
    async def main() -> None:
        pool = PostgreSqlConnections(place.url, 1)
        async with pool.one() as connection:
            pass
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), pool.one() as connection:
                await connection.execute("SELECT pg_sleep(30)")
        while not all(each.done() for each in pool._leaving):
            await asyncio.sleep(0)
        await pool.close()
        assert connection.closed

    asyncio.run(main())


@pytest.mark.req("BC-41")
def test_queries_that_were_left_end_and_their_connections_are_counted(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            pool = store._connections
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05), pool.one() as connection:
                        await connection.execute("SELECT pg_sleep(30)")
                [(running,)] = place.ask(
                    "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'"
                    f" AND application_name = '{place.name}'"
                )
                assert running <= CONNECTIONS
            await until_async(lambda: not pool._leaving)
            assert pool._free._value == CONNECTIONS, "each is given back once"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), pool.one() as connection, connection.transaction():
                    await connection.execute("SELECT pg_sleep(30)")
        assert connection.closed

    asyncio.run(main())


@pytest.mark.req("BC-41")
def test_a_query_that_was_left_does_not_keep_its_connection_open_when_the_store_closes(
    place: StorePlace,
) -> None:
    async def main() -> None:
        pool = PostgreSqlConnections(place.url, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), pool.one() as connection:
                await connection.execute("SELECT pg_sleep(30)")
        await pool.close()  # before the server was asked
        assert connection.closed
        assert not pool._free.locked()

    asyncio.run(main())


@pytest.mark.req("BC-15", "BC-16")
def test_an_append_whose_answer_is_lost_can_be_repeated(place: StorePlace) -> None:
    async def main() -> None:
        async with lossy(place) as line, place.opened(**line.address) as store:
            await store.append(fact("first"))
            line.strike(WireFault.LOST_REPLY, on=b"onceward_boundary_append")
            with pytest.raises(Unavailable, match="try again"):
                await store.append(fact("second"))
            assert line.struck == 1
            assert await store.append(fact("second")) == Appended(2, duplicate=True)
            line.strike(WireFault.LOST_REPLY, on=b"onceward_boundary_cursors")
            with pytest.raises(Unavailable, match="try again"):
                await store.advance("c", 2)
            assert await store.advance("c", 1) == 2

    asyncio.run(main())


def test_an_object_whose_last_answer_is_lost_is_whole(place: StorePlace) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"x" * 100_000

    async def main() -> None:
        async with lossy(place) as line, place.opened(**line.address) as store:
            line.strike(WireFault.LOST_REPLY, on=b"COMMIT")
            with pytest.raises(Unavailable):
                await store.objects.put("b", "k", content(), "")
            assert line.struck == 1
            ref, chunks = await store.objects.get("b", "k")
            assert b"".join([chunk async for chunk in chunks]) == b"x" * 100_000
            assert await store.objects.put("b", "k", content(), "") == ref

    asyncio.run(main())


@asynccontextmanager
async def lossy(place: StorePlace) -> AsyncIterator[TcpProxy]:
    to = conninfo_to_dict(place.url)
    with proxy_to(str(to["host"]), int(to.get("port") or 5432)) as line:
        yield line


# ── opening ─────────────────────────────────────────────────────────────────────────────────────────────


def test_servers_that_start_at_once_on_an_empty_database_all_start(place: StorePlace) -> None:
    async def main() -> None:
        stores = await asyncio.gather(*(PostgreSqlBoundaryStore.open(place.url) for _ in range(5)))
        appended = await asyncio.gather(*(store.append(fact("m")) for store in stores))
        assert {each.offset for each in appended} == {1}
        await asyncio.gather(*(store.close() for store in stores))

    asyncio.run(main())


def refusal(url: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        asyncio.run(PostgreSqlBoundaryStore.open(url))
    return str(raised.value)


@pytest.mark.req("RN-13")
@pytest.mark.parametrize(
    ("options", "limit"), [({}, "30s"), ({"options": "-c statement_timeout=1min"}, "1min")]
)
def test_a_statement_has_a_limit_that_the_url_can_change(
    place: StorePlace, options: dict[str, str], limit: str
) -> None:
    async def main() -> None:
        before = conninfo_to_dict(place.url).get("options") or ""
        url = make_conninfo(place.url, options=f"{before} {options.get('options', '')}")
        async with PostgreSqlConnections(url, 1).one() as connection:
            shown = await connection.execute("SHOW statement_timeout")
            assert await shown.fetchone() == (limit,)
            await connection.close()

    asyncio.run(main())


@pytest.mark.req("BC-52")
def test_tables_of_the_second_version_are_upgraded(place: StorePlace) -> None:
    async def body() -> None:
        async with place.opened() as store:
            await store.append(fact("m1"))
        _forget_holes(place)
        place.admin.execute("ALTER TABLE onceward_boundary_log DROP COLUMN trusted_time")
        place.admin.execute("UPDATE onceward_boundary_schema SET version = 2")
        async with place.opened() as store:
            assert await store.trusted_time() is None
            await store.trust_time(Moment(1000.0))
            assert await store.trusted_time() == Moment(1000.0)
            assert len(await store.read(0, 10)) == 1

    asyncio.run(body())


def test_tables_of_a_newer_onceward_are_not_touched(place: StorePlace) -> None:
    place.admin.execute("CREATE TABLE onceward_boundary_schema AS SELECT 99 AS version")
    assert f"newer onceward (schema 99, this one supports {VERSION})" in refusal(place.url)
    assert place.ask(f"SELECT tablename FROM pg_tables WHERE schemaname = '{place.name}'") == [
        ("onceward_boundary_schema",)
    ]


def test_a_database_that_cannot_hold_every_text_is_refused(place: StorePlace) -> None:
    place.admin.execute(
        f"CREATE DATABASE {place.name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0 STRATEGY file_copy"
    )
    try:
        assert "encoding LATIN1" in refusal(make_conninfo(place.url, dbname=place.name))
    finally:
        place.admin.execute(f"DROP DATABASE {place.name} WITH (FORCE)")


def test_a_user_who_may_not_make_tables_is_notified(place: StorePlace) -> None:
    place.admin.execute(f"CREATE ROLE {place.name} LOGIN; GRANT USAGE ON SCHEMA {place.name} TO {place.name}")
    try:
        reported = refusal(make_conninfo(place.url, user=place.name))
        assert "permission denied" in reported
        assert "its user may create tables" in reported
    finally:
        place.admin.execute(f"DROP OWNED BY {place.name}; DROP ROLE {place.name}")


def test_a_user_who_may_not_make_tables_is_enough_where_they_are(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened():
            pass
        place.admin.execute(f"""
            CREATE ROLE {place.name} LOGIN; GRANT USAGE ON SCHEMA {place.name} TO {place.name};
            GRANT ALL ON ALL TABLES IN SCHEMA {place.name} TO {place.name};
            GRANT ALL ON ALL SEQUENCES IN SCHEMA {place.name} TO {place.name}
        """)
        try:
            async with place.opened(user=place.name) as store:
                assert await store.append(fact("m")) == Appended(1)
        finally:
            place.admin.execute(f"DROP OWNED BY {place.name}; DROP ROLE {place.name}")

    asyncio.run(main())


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    reported = refusal("postgresql://someone:secret@127.0.0.1:1/facts")
    assert "127.0.0.1" in reported
    assert "check its URL" in reported
    assert "secret" not in reported


def test_a_url_that_is_none_is_refused() -> None:
    assert "such as postgresql://user@host/database" in refusal("postgresql://host/database?no_such=option")


@pytest.mark.req("BC-16")
@pytest.mark.parametrize(
    ("given", "used"), [("off", "on"), ("local", "on"), ("on", "on"), ("remote_apply", "remote_apply")]
)
def test_what_is_answered_is_durable_whatever_the_url_asks_for(
    place: StorePlace, given: str, used: str
) -> None:
    async def main() -> None:
        connections = PostgreSqlConnections(
            make_conninfo(place.url, options=f"-csynchronous_commit={given}"), 1
        )
        async with connections.one() as connection:
            shown = await (await connection.execute("SHOW synchronous_commit")).fetchone()
        await connections.close()
        assert shown == (used,)

    asyncio.run(main())


@pytest.mark.req("BC-36", "BC-40")
def test_tables_of_the_first_version_are_upgraded_and_its_servers_go_on(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            await store.objects.put("b", "k", _piece(b"x" * 1000), "")
        # As the first version made them.
        _forget_holes(place)
        place.admin.execute("ALTER TABLE onceward_boundary_log DROP COLUMN trusted_time")
        place.admin.execute("DROP TABLE onceward_boundary_usage")
        place.admin.execute(
            "DROP FUNCTION onceward_boundary_append(text[],bytea[],bytea[],text[],bigint[],bigint[])"
        )
        place.admin.execute("UPDATE onceward_boundary_schema SET version = 1")
        async with place.opened() as store, place.opened():
            assert (await store.append(fact("m1"))).offset == 1
            with pytest.raises(QuotaExceeded, match="take 1,000 bytes"):
                await store.objects.put("b", "new", _piece(b"y"), "", ObjectQuota(size=1000))

    asyncio.run(main())
    assert place.ask("SELECT version FROM onceward_boundary_schema") == [(VERSION,)]
    assert place.ask("SELECT * FROM onceward_boundary_usage") == [(1, 1000)]


@pytest.mark.req("BC-49")
def test_tables_of_the_third_version_are_upgraded(place: StorePlace) -> None:
    async def main() -> None:
        async with place.opened() as store:
            for number, stream in enumerate(["audit", "documents", "audit"], 1):
                await store.append(fact(f"m{number}", stream=stream, appended_at=1000))
            await store.position("old", create=True)
        _forget_holes(place)
        place.admin.execute("UPDATE onceward_boundary_schema SET version = 3")
        async with place.opened() as store:
            await store.expire({"documents": 2000})
            await store.position("new", create=True)
            assert await store.holes("old", Gap(2, 2)) == []
            assert await store.holes("new", Gap(2, 2)) == [(2, 2)]

    asyncio.run(main())


def _forget_holes(place: StorePlace) -> None:
    """Take away what the fourth version added."""
    place.admin.execute("DROP TABLE onceward_boundary_holes")
    place.admin.execute("ALTER TABLE onceward_boundary_log DROP COLUMN removals")
    place.admin.execute("ALTER TABLE onceward_boundary_cursors DROP COLUMN after_removal")


async def _piece(data: bytes) -> AsyncIterator[bytes]:
    yield data
