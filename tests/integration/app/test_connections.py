"""Connections to the database: one pool for all consumers of a process, no larger than it says."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine

from onceward import Onceward
from onceward.app.build import open_task, open_task_async
from onceward.app.engines import LISTENING, most_connections, pool_sizes
from onceward.connectors import SqliteConnector
from onceward.inbox import Busy, Contract, Event, Inbox
from onceward.inspection.guarantee_facts import facts_of
from onceward.inspection.guarantees import judge
from onceward.inspection.probes import accepted_connections, open_database
from onceward.run import connections
from onceward.transaction import Transaction
from tests.support.run.world import Site
from tests.support.schema import new_schema
from tests.support.wait import until

SIX = """
from onceward import Onceward
from onceward.inbox import Contract

app = Onceward("shop", concurrency=4, processes=2)


def make(name):
    contract = Contract(consumer_id=name, event_types=["*"], owner_team="t", idempotency_mechanism="inbox row")

    @app.consumer(f"sqlite:///{name}.db", contract=contract, name=name)
    def consume(order: dict, session) -> None:
        session.execute("SELECT pg_sleep(0.05)")
        session.execute("INSERT INTO charges VALUES (:id)", {"id": f"{name}-{order['id']}"})


for number in range(6):
    make(f"c{number}")
"""


def contract(name: str) -> Contract:
    return Contract(consumer_id=name, event_types=["*"], owner_team="t", idempotency_mechanism="inbox row")


def app_of(directory: Path, *concurrencies: int, **settings: Any) -> Onceward:
    """Consumers of this concurrency each; negative for asyncio, 0 for one without a contract."""
    app = Onceward("shop", **{"database": f"sqlite:///{directory}/shop.db", **settings})
    for number, value in enumerate(concurrencies):
        name = f"c{number}"
        policy = {"loop": {"concurrency": {"value": abs(value) or 5}}}
        given = {"name": name, "policy": policy, "contract": contract(name) if value else None}
        if value == 0:

            def consume(order: dict) -> None: ...  # type: ignore[type-arg]
        elif value < 0:

            async def consume(order: dict, session: Any) -> None: ...  # type: ignore[type-arg,misc]
        else:

            def consume(order: dict, session: Any) -> None: ...  # type: ignore[type-arg,misc]

        app.consumer(f"sqlite:///{directory}/{name}.db", **given)(consume)
    return app


@pytest.mark.req("RN-05")
@pytest.mark.parametrize(
    ("concurrencies", "settings", "sizes"),
    [
        ((1,), {}, (3, None)),
        ((1, 1, 1), {}, (5, None)),
        ((16,) * 6, {}, (18, None)),
        ((64, 1), {}, (66, None)),
        ((0, 0), {}, (3, None)),
        ((-8,), {}, (None, 10)),
        ((16, 16, -16, -16), {}, (10, 10)),
        ((16,) * 6, {"pool_size": 7}, (7, None)),
        ((16, -16), {"pool_size": 10}, (5, 5)),
        ((0, -16), {"pool_size": 10}, (1, 9)),
    ],
)
def test_a_pool_has_room_for_the_messages_in_flight_up_to_a_limit(
    tmp_path: Path, concurrencies: tuple[int, ...], settings: dict[str, Any], sizes: tuple[int | None, ...]
) -> None:
    app = app_of(tmp_path, *concurrencies, **settings, processes=3)
    for mode, size in zip((False, True), sizes, strict=True):
        if size is not None:
            assert pool_sizes(app)[mode] == size
    # The relay of the outbox runs in threads, and has a connection on which it listens.
    relay = LISTENING + (0 if sizes[0] is not None else pool_sizes(app)[False])
    assert most_connections(app) == 3 * (sum(size for size in sizes if size is not None) + relay)


@pytest.mark.req("RN-05")
def test_a_consumer_that_was_separated_takes_its_share_of_the_connections_with_it(tmp_path: Path) -> None:
    app = app_of(tmp_path, *(16,) * 6, processes=4)
    sizes = []
    for app.only in (("c0",), ("c1", "c2", "c3", "c4", "c5")):
        sizes.append(pool_sizes(app)[False])
    assert sizes == [3 + 2, 14 + 2], "together no more than before, but for what each needs itself"


@pytest.mark.req("RN-05")
@pytest.mark.parametrize(
    ("accepted", "settings", "size"),
    [(97, {}, None), (27, {}, 4), (76, {}, 16), (3, {}, 1), (27, {"pool_size": 18}, None), (None, {}, None)],
)
def test_a_run_opens_fewer_connections_if_postgresql_accepts_fewer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    accepted: int | None,
    settings: dict[str, Any],
    size: int | None,
) -> None:
    monkeypatch.setattr(connections, "_accepted", lambda app: accepted)
    app = app_of(tmp_path, *(16,) * 6, processes=4, **settings)
    assert connections.pool_size_that_fits(app) == size
    assert bool(caplog.records) == (size is not None or bool(settings))


@pytest.mark.req("RN-05")
def test_the_workers_of_a_run_know_what_postgresql_accepts(tmp_path: Path, postgres_url: str) -> None:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(SIX)
    with new_schema(postgres_url) as schema:
        schema.execute(f"CREATE TABLE {schema.name}.charges (id TEXT)")
        site.environ["ONCEWARD_DATABASE"] = schema.plain_url
        with site.run("--processes", "1", "--concurrency", "500", "--drain") as run:
            assert run.ended() == 0
    accepted = accepted_by(postgres_url)
    assert run.says(f"each opens at most {accepted - connections.FOR_OTHERS - LISTENING}")


def accepted_by(url: str) -> int:
    with open_database(url) as connection:
        assert connection is not None
        return accepted_connections(connection)


@pytest.mark.req("RN-05")
def test_all_consumers_of_a_process_share_one_engine_until_the_last_has_ended(tmp_path: Path) -> None:
    app = app_of(tmp_path, 2, 3)
    with ExitStack() as tasks:
        for consumer in app.consumers.values():
            tasks.enter_context(open_task(app, consumer))
        engine = app.engines.take(asynchronous=False)
        app.engines.give_back()
        assert engine is app.engines.take(asynchronous=False)
        app.engines.give_back()
        assert engine.pool.size() == 7
    assert app.engines.take(asynchronous=False) is not engine
    app.engines.give_back()


@pytest.mark.req("RN-05")
def test_in_asyncio_each_event_loop_has_its_own(tmp_path: Path) -> None:
    app = app_of(tmp_path, -2, -3)

    async def engine() -> Any:
        async with open_task_async(app, app.consumers["c0"]), open_task_async(app, app.consumers["c1"]):
            found = app.engines.take(asynchronous=True)
            await app.engines.give_back_async()
            return found

    assert asyncio.run(engine()) is not asyncio.run(engine())


@pytest.mark.req("RN-05")
def test_six_consumers_in_two_processes_stay_within_their_pools(tmp_path: Path, postgres_url: str) -> None:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(SIX)
    mark = f"pool-{uuid4().hex[:8]}"
    for number in range(6):
        with SqliteConnector(tmp_path / f"c{number}.db") as queue:
            queue.dispatch_transactions([Transaction(payload={"id": each}) for each in range(40)])
    with new_schema(postgres_url) as schema:
        schema.execute(f"CREATE TABLE {schema.name}.charges (id TEXT)")
        site.environ["ONCEWARD_DATABASE"] = f"{schema.plain_url}&application_name={mark}"
        seen: list[int] = []

        def is_done() -> bool:
            query = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{mark}'"
            seen.append(schema.execute(query)[0][0])
            return bool(schema.execute(f"SELECT count(*) FROM {schema.name}.charges")[0][0] == 240)

        with site.run() as run:
            until(is_done)
            run.signal(signal.SIGTERM)
            assert run.ended() == 0
        assert not run.has_said("too many clients")
        assert not run.has_said("QueuePool")
    assert 2 < max(seen) <= 2 * (18 + 1)  # the relay of the outbox has one to listen on


@pytest.mark.req("RN-05")
def test_an_event_that_gets_no_connection_waits_and_has_not_failed(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db", pool_size=1, max_overflow=0, pool_timeout=0.05)
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(contract("billing"))
    event = Event.of(Transaction(id="e1", payload={}))
    with engine.connect(), pytest.raises(Busy, match="all connections of the pool are in use"):
        inbox.process(contract("billing"), event, lambda event, session: None)
    assert inbox.process(contract("billing"), event, lambda event, session: None).done
    engine.dispose()


@pytest.mark.req("RN-05")
@pytest.mark.parametrize(("processes", "advice"), [(1, False), (50, True)])
def test_explain_compares_the_connections_of_a_run_with_what_postgresql_accepts(
    tmp_path: Path, postgres_url: str, processes: int, advice: bool
) -> None:
    app = app_of(tmp_path, 4, database=postgres_url, processes=processes)
    links = judge(facts_of(app, app.consumers["c0"])).links
    [link] = [each for each in links if "connections" in each.why]
    assert f"{(6 + LISTENING) * processes} " in link.why
    assert ("pool_size" in link.advice) is advice


@pytest.mark.req("RN-05")
def test_explain_says_that_it_does_not_know_what_a_server_accepts_that_it_cannot_reach(
    tmp_path: Path,
) -> None:
    app = app_of(tmp_path, 4, database="postgresql://nobody@127.0.0.1:1/none")
    assert (
        "whether PostgreSQL accepts up to 7 connections"
        in judge(facts_of(app, app.consumers["c0"])).not_checked
    )
