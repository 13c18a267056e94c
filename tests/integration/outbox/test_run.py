"""The relay inside `onceward run`, and alone: a chain of consumers through kills, its counts and its gauges."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from onceward.connectors import SqliteConnector
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


@pytest.mark.req("OB-16")
def test_a_chain_of_consumers_survives_kills(chain: Chain) -> None:
    chain.send(ORDERS)
    with chain.site.run("--health", "127.0.0.1:0") as run:
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


@pytest.mark.req("OB-16")
def test_a_relay_needs_a_database(tmp_path: Path) -> None:
    site = Site(tmp_path)
    command = [sys.executable, "-m", "onceward", "relay", "shop:app"]
    relay = LoggedProcess(command, tmp_path / "relay.log", cwd=tmp_path, env={**site.environ})
    assert relay.process.wait(60) == 2
    assert "has no database" in relay.log
