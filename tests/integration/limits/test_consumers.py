"""Limited consumers in one process: what starts when, what waits where, and what fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from onceward import Contract, Limit, Onceward, Transaction
from onceward.app.build import open_task, open_task_async
from onceward.connectors import SqliteConnector
from onceward.deadletters import DeadLetters
from onceward.task.report import Report
from tests.support.wait import LIMIT

CONTRACT = Contract(
    consumer_id="billing",
    event_types=["*"],
    owner_team="tests",
    idempotency_mechanism="record and row together",
)


class Shop:
    """An app, and what its handlers did."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.database = f"sqlite:///{directory}/shop.db"
        self.source = f"sqlite:///{directory}/orders.db"
        self.app = Onceward("shop", database=self.database)
        self.began: list[float] = []
        self.numbers: list[int] = []
        self.most: Counter[Any] = Counter()
        self._now: Counter[Any] = Counter()
        self._lock = threading.Lock()

    def begin(self, order: dict[str, Any]) -> None:
        key = order.get("customer")
        with self._lock:
            self.began.append(time.monotonic())
            self.numbers.append(order["number"])
            self._now[key] += 1
            self.most[key] = max(self.most[key], self._now[key])

    def end(self, order: dict[str, Any]) -> None:
        with self._lock:
            self._now[order.get("customer")] -= 1

    def order(self, *orders: dict[str, Any]) -> None:
        with SqliteConnector(self.directory / "orders.db") as queue:
            queue.dispatch_transactions([Transaction(payload=order) for order in orders])

    def drain(self, name: str = "charge") -> Report:
        consumer = self.app.consumers[name]
        if consumer.asynchronous:
            return asyncio.run(self._drain_async(name))
        with open_task(self.app, consumer) as task:
            return task.consume_transactions(consumer.policy)

    async def _drain_async(self, name: str) -> Report:
        consumer = self.app.consumers[name]
        async with open_task_async(self.app, consumer) as task:
            return await task.consume_transactions(consumer.policy)

    def ask(self, query: str) -> list[Any]:
        engine = create_engine(self.database)
        with engine.connect() as connection:
            found = list(connection.execute(text(query)).scalars())
        engine.dispose()
        return found

    def deliveries(self) -> Counter[tuple[int, int]]:
        """Counted and lost deliveries of all that is in the queue."""
        engine = create_engine(self.source)
        with engine.connect() as connection:
            found = Counter(map(tuple, connection.execute(text("SELECT deliveries, lost FROM messages"))))
        engine.dispose()
        return found


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.mark.req("LI-01")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_starts_are_never_closer_than_the_rate_for_long(shop: Shop, mode: str) -> None:
    if mode == "threads":

        @shop.app.consumer(shop.source, contract=None, limit=Limit(rate="20/s"), name="charge")
        def charge(order: dict[str, Any]) -> None:
            shop.begin(order)
    else:

        @shop.app.consumer(shop.source, contract=None, limit=Limit(rate="20/s"), name="charge")
        async def charge_async(order: dict[str, Any]) -> None:
            shop.begin(order)

    shop.order(*({"number": number} for number in range(30)))
    report = shop.drain()
    assert (report.succeeded, sorted(shop.numbers)) == (30, list(range(30)))
    span = max(shop.began) - min(shop.began)
    assert span >= 29 * 0.05 - 0.25 - 0.01  # the first may be late by a quarter of a second


@pytest.mark.req("LI-02", "LI-04")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_handlers_of_a_key_wait_for_each_other_and_those_of_others_do_not(shop: Shop, mode: str) -> None:
    limit = Limit(concurrency=2, by="customer")
    if mode == "threads":

        @shop.app.consumer(shop.source, contract=None, limit=limit, name="charge")
        def charge(order: dict[str, Any]) -> None:
            shop.begin(order)
            time.sleep(0.02)
            shop.end(order)
    else:

        @shop.app.consumer(shop.source, contract=None, limit=limit, name="charge")
        async def charge_async(order: dict[str, Any]) -> None:
            shop.begin(order)
            await asyncio.sleep(0.02)
            shop.end(order)

    shop.order(*({"number": number, "customer": number % 3} for number in range(60)))
    assert shop.drain().succeeded == 60
    assert sorted(shop.numbers) == list(range(60))
    assert max(shop.most.values()) == 2
    assert shop.ask("SELECT count(*) FROM onceward_limit_slots") == [0]


@pytest.mark.req("LI-04")
def test_a_key_with_many_messages_does_not_hold_up_the_others(shop: Shop) -> None:
    stop = threading.Event()

    @shop.app.consumer(
        shop.source, contract=None, limit=Limit(rate="1/h", by=lambda order: order["customer"])
    )
    def charge(order: dict[str, Any]) -> None:
        shop.begin(order)
        if len(shop.numbers) == 51:
            stop.set()

    shop.order(*({"number": number, "customer": "hot"} for number in range(500)))
    shop.order(*({"number": number, "customer": number} for number in range(500, 550)))
    consumer = shop.app.consumers["charge"]
    policy = consumer.policy.model_copy(
        update={"loop": consumer.policy.loop.model_copy(update={"streaming": True})}
    )
    with open_task(shop.app, consumer) as task:
        threading.Thread(target=lambda: (stop.wait(LIMIT), task.stop()), daemon=True).start()
        report = task.consume_transactions(policy)
    assert (report.succeeded, report.failed) == (51, 0)
    assert sorted(shop.numbers)[1:] == list(range(500, 550))
    assert shop.deliveries() == {(0, 0): 499}, "a message that waits has spent no delivery"
    assert shop.ask("SELECT count(*) FROM onceward_dead_letters") == [0]


@pytest.mark.req("LI-05")
@pytest.mark.parametrize("contract", [None, CONTRACT], ids=["without a contract", "with a contract"])
def test_a_message_without_its_key_is_buried_with_the_reason(shop: Shop, contract: Contract | None) -> None:
    limit = Limit(rate="1000/s", concurrency=2, by="customer")
    if contract is None:

        @shop.app.consumer(shop.source, contract=None, limit=limit, name="charge")
        def charge(order: dict[str, Any]) -> None:
            shop.begin(order)
    else:

        @shop.app.consumer(shop.source, contract=contract, limit=limit, name="charge")
        def charge_with_session(order: dict[str, Any], session: Any) -> None:
            shop.begin(order)

    shop.order({"number": 1}, {"number": 2, "customer": "anna"})
    report = shop.drain()
    assert (report.succeeded, report.failed, shop.numbers) == (1, 1, [2])
    engine = create_engine(shop.database)
    [letter] = DeadLetters(engine).find()
    engine.dispose()
    assert "charge is limited by 'customer', but the payload of this message has no such field" in str(
        letter.error
    )
    assert shop.ask("SELECT count(*) FROM onceward_attempts WHERE ends < starts") == [0]


@pytest.mark.req("LI-02")
@pytest.mark.parametrize("commit", ["group", "each", "batch"])
def test_slots_are_kept_until_the_commit(shop: Shop, commit: str) -> None:
    limit = Limit(concurrency=3)
    if commit == "batch":

        @shop.app.consumer(shop.source, contract=CONTRACT, limit=limit, name="charge")
        def charge_all(orders: list[dict[str, Any]], session: Any) -> None:
            assert len(orders) <= 3
            for order in orders:
                shop.begin(order)
    else:

        @shop.app.consumer(shop.source, contract=CONTRACT, limit=limit, commit=commit, name="charge")  # type: ignore[arg-type]
        def charge(order: dict[str, Any], session: Any) -> None:
            shop.begin(order)
            assert shop.ask("SELECT count(*) FROM onceward_limit_slots")[0] <= 3
            shop.end(order)

    shop.order(*({"number": number} for number in range(12)))
    assert shop.drain().succeeded == 12
    assert sorted(shop.numbers) == list(range(12))
    assert shop.ask("SELECT count(*) FROM onceward_limit_slots") == [0]
    assert shop.ask("SELECT count(*) FROM onceward_attempts WHERE ends < starts") == [0]


@pytest.mark.req("LI-01")
def test_a_failure_frees_its_slot_and_each_delivery_is_a_start(shop: Shop) -> None:
    source = f"{shop.source}?max_deliveries=3&redelivery_delay=0.1"

    @shop.app.consumer(source, contract=None, limit=Limit(rate="4/s", concurrency=1))
    def charge(order: dict[str, Any]) -> None:
        shop.begin(order)
        shop.end(order)
        raise OSError("declined")

    shop.order({"number": 1})
    deadline = time.monotonic() + 60
    while len(shop.began) < 3 and time.monotonic() < deadline:
        shop.drain()
    assert len(shop.began) == 3
    assert all(after - before >= 0.24 - 0.1 for before, after in pairwise(shop.began))
    assert shop.ask("SELECT count(*) FROM onceward_limit_slots") == [0]
    assert shop.ask("SELECT count(*) FROM onceward_dead_letters") == [1]
