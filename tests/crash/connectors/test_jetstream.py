"""Consumers of JetStream and its server are killed at the worst moments: every effect happens once, nothing is lost."""

from __future__ import annotations

import asyncio
import signal
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig
from sqlalchemy import create_engine

from onceward import Transaction
from onceward._nats.connection import NatsUnavailable
from onceward.connectors.jetstream import JetStreamConnector
from onceward.inbox import Inbox
from onceward.testing.servers import Server, nats_cluster, nats_server
from onceward.transaction import Settlement, Verdict
from tests.crash.connectors import jetstream_worker as worker
from tests.crash.connectors.jetstream_worker import CONTRACT, LEASE, REFUSED, STREAM, JetStreamOrders
from tests.support.fork_server import FORKED
from tests.support.processes import LoggedProcess
from tests.support.run.world import COMMAND
from tests.support.wait import until

ORDERS = 40
PATIENCE = 60.0


class JetStreamDesk:
    def __init__(self, server: Server, directory: Path, asynchronous: bool) -> None:
        self.server = server
        self.directory = directory
        self.database = directory / "billing.db"
        self.asynchronous = asynchronous
        engine = create_engine(f"sqlite:///{self.database}")
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE bills (id TEXT, number INTEGER)")
        inbox = Inbox(engine)
        inbox.migrate()
        inbox.register(CONTRACT)
        engine.dispose()

    def queue(self) -> JetStreamConnector:
        return JetStreamConnector(self.server.url, STREAM, lease=LEASE)

    def send(self, *numbers: int) -> None:
        with self.queue() as queue:
            queue.dispatch_transactions([order(number) for number in numbers])

    def start(self, **orders: Any) -> Any:
        given = JetStreamOrders(self.server.url, str(self.database), self.asynchronous, **orders)
        process = FORKED.Process(target=worker.run, args=(given,))
        process.start()
        return process

    def ends(self, **orders: Any) -> int:
        """Its exit code."""
        process = self.start(**orders)
        process.join(PATIENCE)
        assert process.exitcode is not None
        return int(process.exitcode)

    def drain(self) -> None:
        """Consume until nothing is waiting, in flight or delayed."""

        def is_empty() -> bool:
            assert self.ends() == 0
            with self.queue() as queue:
                counts = queue.counts()
            return counts["ready"] + counts["leased"] == 0

        until(is_empty)

    def effects(self) -> Counter[int]:
        with closing(connect(self.database)) as connection:
            return Counter(number for (number,) in connection.execute("SELECT number FROM bills"))

    def letters(self) -> list[Any]:
        with self.queue() as queue:
            return queue.dead_letters()


def order(number: int) -> Transaction:
    return Transaction(f"order-{number}", {"number": number}, {"event_type": "ordered"})


@pytest.fixture(params=["threads", "asyncio"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JetStreamDesk]:
    with nats_server() as server:
        yield JetStreamDesk(server, tmp_path, request.param == "asyncio")


@pytest.mark.req("NJ-09")
@pytest.mark.parametrize(
    ("point", "after"),
    [
        ("pulled", 1),
        pytest.param("handler", 7, marks=pytest.mark.long),
        ("acknowledge", 1),
        pytest.param("acknowledged", 0, marks=pytest.mark.long),
        ("letter", 0),
        pytest.param("buried", 0, marks=pytest.mark.long),
    ],
)
def test_a_killed_consumer_loses_nothing_and_doubles_nothing(
    desk: JetStreamDesk, point: str, after: int
) -> None:
    """After a pull, before a commit, before and after an acknowledgment, before and after a dead letter is kept."""
    desk.send(*range(1, ORDERS + 1))
    assert desk.ends(point=point, after=after) == -signal.SIGKILL
    assert max(desk.effects().values(), default=1) == 1
    desk.drain()
    assert desk.effects() == Counter(set(range(1, ORDERS + 1)) - {REFUSED})
    [letter] = desk.letters()
    assert letter.transaction_id == f"order-{REFUSED}"


@pytest.mark.long
@pytest.mark.req("NJ-09")
def test_consumers_killed_again_and_again_while_orders_come_in(desk: JetStreamDesk) -> None:
    desk.send(*range(1, 31))
    workers = [desk.start(), desk.start()]
    for number in range(31, 91, 10):
        desk.send(*range(number, number + 10))
        workers.pop(0).kill()
        workers.append(desk.start())
    for each in workers:
        each.join(PATIENCE)
    desk.drain()
    assert desk.effects() == Counter(set(range(1, 91)) - {REFUSED})
    assert len(desk.letters()) == 1


APP = """
    from onceward import Onceward, Contract

    app = Onceward(database="sqlite:///{database}")

    @app.consumer(source="{url}/ORDERS?lease=2", contract=Contract(
        consumer_id="shipping", event_types=["ordered"], owner_team="shop",
        idempotency_mechanism="dedup row and bill in one transaction",
    ))
    {definition} ship(order: dict, session) -> None:
        {wait}session.execute("INSERT INTO bills (id, number) VALUES (:id, :number)",
                        {{"id": "x", "number": order["number"]}})
"""


@pytest.mark.req("NJ-09")
def test_the_server_killed_under_load_loses_nothing_and_doubles_nothing(desk: JetStreamDesk) -> None:
    """`onceward run` waits out the outage, and the sender repeats what was not confirmed, with the same ids."""
    text = textwrap.dedent(APP).format(
        database=desk.database,
        url=desk.server.url,
        definition="async def" if desk.asynchronous else "def",
        wait="await " if desk.asynchronous else "",
    )
    (desk.directory / "shop.py").write_text(text)
    run = LoggedProcess(
        [*COMMAND, "shop:app", "--log-format", "json"], desk.directory / "run.log", cwd=desk.directory
    )
    try:
        numbers = iter(range(1, 301))
        with JetStreamConnector(desk.server.url, STREAM, lease=2.0) as sender:
            for number in numbers:
                if number in (100, 200):
                    until(lambda least=number - 60: len(desk.effects()) > least)  # type: ignore[misc]
                    desk.server.kill()
                    desk.server.start()
                _send(sender, order(number))
        until(lambda: len(desk.effects()) == 300, what=run.log[-2000:])
    finally:
        run.kill()
    assert desk.effects() == Counter(range(1, 301))


@pytest.mark.long
@pytest.mark.req("NJ-09")
def test_servers_of_a_cluster_killed_in_turn_lose_nothing() -> None:
    with nats_cluster() as cluster:
        url = ",".join(each.url for each in cluster.values())
        _create_replicated(url)
        seen: Counter[int] = Counter()
        with JetStreamConnector(url, STREAM, lease=3.0) as queue:
            for name, first in zip(cluster, range(0, 300, 100), strict=True):
                for number in range(first, first + 100):
                    _send(queue, order(number))
                    if number % 10 == 5:
                        _consume(queue, seen)
                cluster[name].kill()
                _consume(queue, seen)
                cluster[name].start()

            def is_complete() -> bool:
                _consume(queue, seen)
                return len(seen) == 300

            until(is_complete)


def _create_replicated(url: str) -> None:
    async def create() -> None:
        client = await nats.connect(url.split(","))
        config = StreamConfig(name=STREAM, subjects=[STREAM], num_replicas=3)
        await client.jetstream().add_stream(config, allow_atomic=True)
        await client.close()

    asyncio.run(create())


def _consume(queue: JetStreamConnector, seen: Counter[int]) -> None:
    try:
        taken = queue.fetch_transactions(20)
        queue.settle_transactions([Settlement(each, Verdict.DONE) for each in taken])
    except NatsUnavailable:
        return  # what was not settled comes back
    seen.update(each.payload["number"] for each in taken)


def _send(sender: JetStreamConnector, transaction: Transaction) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            sender.dispatch_transactions([transaction])
            return
        except NatsUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.05)
