"""The relay inside `onceward run`, and alone: a chain of consumers through kills, its counts and its gauges."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from onceward import Onceward
from onceward.connectors import SqliteConnector
from onceward.inbox import Inbox
from onceward.transaction import Transaction
from tests.support.processes import LoggedProcess
from tests.support.run.world import Site
from tests.support.schema import new_schema
from tests.support.wait import until

CHAIN = """
    from onceward import Contract, Onceward

    app = Onceward("shop")

    def contract(name):
        return Contract(consumer_id=name, event_types=["order"], owner_team="shop", idempotency_mechanism="inbox")

    QUICK = {"loop": {"concurrency": {"value": 4}, "empty_queue": {"backoff": 0.02, "backoff_cap": 0.05}}}

    @app.consumer("sqlite:///shipping.db?lease=5", contract=contract("ship"), policy=QUICK)
    MODE ship(order: dict, session):
        WAIT session.execute("INSERT INTO shipments (id) VALUES (:id)", {"id": order["id"]})

    @app.consumer("sqlite:///orders.db?lease=5", contract=contract("charge"), policy=QUICK)
    MODE charge(order: dict, session):
        WAIT session.execute("INSERT INTO charges (id) VALUES (:id)", {"id": order["id"]})
        WAIT session.send(ship, order, key=str(order["id"] % 3), headers={"event_type": "order"})
"""
TABLES = ("charges", "shipments")
ORDERS = 40


@pytest.fixture(
    params=[
        pytest.param("sqlite-threads", marks=pytest.mark.long),
        "sqlite-asyncio",
        pytest.param("postgresql-threads", marks=pytest.mark.long),
    ]
)
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chain]:
    database, mode = request.param.split("-")
    with ExitStack() as opened:
        url = f"sqlite:///{tmp_path}/shop.db"
        if database != "sqlite":
            url = opened.enter_context(new_schema(request.getfixturevalue("postgres_url"))).plain_url
        made = Chain(tmp_path, mode, url)
        opened.callback(made.engine.dispose)
        yield made


class Chain:
    """Orders that are charged, then shipped."""

    def __init__(self, directory: Path, mode: str, database: str) -> None:
        self.site = Site(directory)
        words = ("async def", "await") if mode == "asyncio" else ("def", "")
        code = "\n".join(line.removeprefix("    ") for line in CHAIN.splitlines())
        (directory / "shop.py").write_text(code.replace("MODE", words[0]).replace("WAIT", words[1]))
        self.site.environ["ONCEWARD_DATABASE"] = database
        self.engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
        with self.engine.begin() as connection:
            for table in TABLES:
                connection.execute(text(f"CREATE TABLE {table} (id INTEGER)"))

    def send(self, number: int) -> None:
        with SqliteConnector(self.site.directory / "orders.db") as queue:
            queue.dispatch_transactions(
                [Transaction(payload={"id": each, "event_type": "order"}) for each in range(number)]
            )

    def ids(self, table: str) -> list[int]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(text(f"SELECT id FROM {table}")).scalars())

    def states(self) -> list[str]:
        with self.engine.connect() as connection:
            return list(connection.execute(text("SELECT state FROM onceward_outbox")).scalars())


def is_due(database: Path) -> bool:
    """Whether the next slot of a schedule for every second is there."""
    engine = create_engine(f"sqlite:///{database}")
    try:
        with engine.connect() as connection:
            last = connection.execute(text("SELECT max(last_slot) FROM onceward_schedules")).scalar_one()
    finally:
        engine.dispose()
    return time.time() > float(last) + 1


@pytest.mark.req("OB-16")
def test_a_chain_of_consumers_survives_kills(chain: Chain) -> None:
    chain.send(ORDERS)
    with chain.site.run("--health", "127.0.0.1:0", ONCEWARD_SAMPLE_EVERY="0.2") as run:
        for number in (ORDERS // 3, ORDERS // 2):
            until(lambda number=number: len(chain.ids("charges")) >= number)  # type: ignore[misc]
            workers = len(run.workers())
            run.signal_worker(signal.SIGKILL)
            until(lambda workers=workers: len(run.workers()) > workers)  # type: ignore[misc]
        until(lambda: len(chain.ids("shipments")) >= ORDERS)
        until(lambda: set(chain.states()) == {"published"})
        until(lambda: "onceward_outbox_waiting 0" in run.get("/metrics")[1])
        metrics = run.get("/metrics")[1]
        assert "onceward_outbox_oldest_waiting_seconds 0" in metrics
        assert 'onceward_consumer_succeeded_total{consumer="outbox-relay",worker="1"}' in metrics
        run.signal(signal.SIGTERM)
        assert run.ended() == 0
    assert chain.ids("charges") == chain.ids("shipments") == list(range(ORDERS))


@pytest.mark.req("OB-16")
def test_onceward_relay_publishes_without_the_consumers(chain: Chain) -> None:
    chain.send(5)
    with chain.site.run("--drain", ONCEWARD_RELAY="false") as run:
        assert run.ended() == 0
    assert (chain.ids("charges"), chain.ids("shipments")) == (list(range(5)), [])
    assert set(chain.states()) == {"ready"}
    command = [sys.executable, "-m", "onceward", "relay", "shop:app", "--drain", "--log-format", "json"]
    environ = {**chain.site.environ, "PYTHONPATH": str(chain.site.directory)}
    log = chain.site.directory / "relay.log"
    relay = LoggedProcess(command, log, cwd=chain.site.directory, env=environ)
    assert relay.process.wait(60) == 0, relay.log
    assert set(chain.states()) == {"published"}
    assert chain.ids("shipments") == []
    with chain.site.run("--drain", "--only", "ship") as run:
        assert run.ended() == 0
        assert run.says("running ship of shop")
    assert chain.ids("shipments") == list(range(5))


@pytest.mark.req("OB-29")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_drain_ends_when_outbox_and_sources_are_empty_together(chain: Chain, processes: str) -> None:
    chain.send(5)
    with chain.site.run("--drain", ONCEWARD_RELAY="false") as run:
        assert run.ended() == 0
    assert set(chain.states()) == {"ready"}
    chain.send(3)
    with chain.site.run("--drain", "--processes", processes) as run:
        assert run.ended() == 0
    assert len(chain.ids("charges")) == 8
    assert chain.ids("shipments") == chain.ids("charges")


@pytest.mark.req("OB-29")
def test_a_drain_that_leaves_messages_fails_and_says_why(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(
        "from onceward import Onceward\n"
        "app = Onceward('shop', database='sqlite:///shop.db')\n"
        "@app.consumer('sqlite:///orders.db', contract=None)\n"
        "def charge(order: dict): ...\n"
    )
    site.send({"id": 1})
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    Inbox(engine).migrate()
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    with engine.begin() as connection:
        for number in range(3):
            app.outbox(connection).send("sqlite:////nowhere/at/all.db", number)
    engine.dispose()
    command = [sys.executable, "-m", "onceward", "relay", "shop:app", "--drain"]
    relay = LoggedProcess(command, tmp_path / "relay.log", cwd=tmp_path, env={**os.environ, **site.environ})
    assert relay.process.wait(60) == 1
    assert "3 messages still wait for sqlite:////nowhere/at/all.db, which cannot be reached: " in relay.log
    assert "source is empty" not in relay.log
    with site.run("--drain") as run:
        assert run.ended() == 1
        assert run.says("3 messages still wait for")
    assert site.counts()["ready"] == 0


@pytest.mark.req("SC-07")
def test_a_drain_sends_the_slot_that_is_due_and_a_stop_does_not_wait_for_a_producer(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "from onceward import Onceward\n"
        "app = Onceward('shop', database='sqlite:///shop.db')\n"
        "@app.consumer('sqlite:///orders.db', contract=None)\n"
        "def charge(order: str): Path('done.txt').write_text(order)\n"
        "@app.every('1s')\n"
        "@app.producer(charge)\n"
        "def make():\n"
        "    Path('begun.txt').write_text('begun')\n"
        "    time.sleep(float(os.environ.get('SLOW', '0')))\n"
        "    return 'made'\n"
    )
    with site.run("--drain") as run:  # the schedule begins
        assert run.ended() == 0
    until(lambda: is_due(tmp_path / "shop.db"))
    with site.run("--drain") as run:
        assert run.ended() == 0
    assert site.done == ["made"]
    (tmp_path / "begun.txt").unlink()
    with site.run(SLOW="3600") as run:
        until(lambda: site.begun == ["begun"])
        run.signal(signal.SIGTERM)
        assert run.ended() == 0


@pytest.mark.req("OB-16")
def test_a_relay_needs_a_database(tmp_path: Path) -> None:
    site = Site(tmp_path)
    command = [sys.executable, "-m", "onceward", "relay", "shop:app"]
    relay = LoggedProcess(command, tmp_path / "relay.log", cwd=tmp_path, env={**site.environ})
    assert relay.process.wait(60) == 2
    assert "has no database" in relay.log
