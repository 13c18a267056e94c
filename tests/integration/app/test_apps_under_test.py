"""`onceward.testing.app`: a whole app in memory, under a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from onceward import Onceward, Transaction, testing
from onceward._time import wall
from onceward.errors import ConfigurationError
from onceward.inbox import AsyncInboxSession, InboxSession
from onceward.task.exceptions import ExceptionCategory, TransactionException
from tests.support.orm_shop import Base, Order, contract


class Payments:
    def charge(self, key: str) -> str:
        raise RuntimeError("this is the real one")


class FakePayments(Payments):
    def charge(self, key: str) -> str:
        return f"paid {key}"


class Shop:
    """Every kind of source, and none of them is there."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.app = app = Onceward("shop", database="postgresql://nobody@localhost:1/shop", env="production")

        @app.service
        def payments() -> Payments:
            return Payments()

        @app.consumer(
            "redis://localhost:1/orders?group=pay", contract=contract(consumer_id="pay", mode="effectful")
        )
        def pay(order: dict[str, Any], payments: Payments, session: InboxSession) -> None:
            session.effect("charge", payments.charge)
            session.execute(
                "INSERT INTO customers (id, name) VALUES (:id, :name)",
                {"id": order["id"], "name": str(order["id"])},
            )
            session.send(ship, order)
            session.send("redis://elsewhere:1/audit", {"paid": order["id"]})
            session.send(remind, order, delay=24 * 3600.0)

        @app.consumer("boundary+http://localhost:1?consumer=ship", contract=contract(consumer_id="ship"))
        async def ship(order: dict[str, Any], session: AsyncInboxSession) -> None:
            self.seen.append(("ship", order["id"]))

        @app.consumer("postgresql://nobody@localhost:1/shop/remind", contract=None)
        def remind(order: dict[str, Any]) -> None:
            self.seen.append(("remind", order["id"]))

        @app.consumer("redis://localhost:1/orders?group=count", contract=None)
        def count(order: dict[str, Any]) -> None:
            self.seen.append(("count", order["id"]))
            if order["id"] < 0:
                raise ValueError("what is this?")

        @app.every("1h")
        @app.consumer("sqlite:///nowhere/at/all.db", contract=None)
        def tick(slot: dict[str, Any]) -> None:
            self.seen.append("tick")

        @app.producer("redis://localhost:1/orders")
        def place(id_: int) -> Transaction:
            return Transaction(id=f"order-{id_}", payload={"id": id_})

        self.pay, self.place, self.count = pay, place, count

    def under_test(self, **more: Any) -> Any:
        given = {"setup": Base.metadata.create_all, "services": {Payments: FakePayments()}, **more}
        return testing.app(self.app, **given)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shop:
    (tmp_path / "nowhere/at").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return Shop()


@pytest.mark.req("IN-12")
def test_every_source_and_sink_is_in_memory(shop: Shop) -> None:
    with shop.under_test() as t:
        t.send(shop.pay, {"id": 1}, id="one")
        t.send("pay", {"id": 1}, id="one")
        report = t.drain()
        assert (report.succeeded, report.duplicates, report.failed) == (3, 1, 0)
        assert t.rows("SELECT id FROM customers WHERE id = :id", id=1) == [{"id": 1}]
        assert [(each.name, each.result) for each in t.effects] == [("charge", f"paid {t.effects[0].key}")]
        assert sorted((each.target, each.payload) for each in t.published) == [
            ("redis://elsewhere:1/audit", {"paid": 1}),
            ("ship", {"id": 1}),
        ]
        assert shop.seen == [("ship", 1)]
    assert shop.app.settings.database == "postgresql://nobody@localhost:1/shop"
    assert shop.app.consumers["pay"].source.url == "redis://localhost:1/orders?group=pay"


@pytest.mark.req("IN-12")
def test_a_place_that_several_consumers_read_reaches_all_of_them(shop: Shop) -> None:
    with shop.under_test() as t:
        shop.app.produce(shop.place, 7)
        t.drain()
        assert sorted(shop.seen) == [("count", 7), ("ship", 7)]
        assert {each.target for each in t.published} >= {"pay", "count"}


@pytest.mark.req("IN-13")
def test_time_passes_when_the_test_says_so(shop: Shop) -> None:
    began = wall()
    with shop.under_test() as t:
        t.send(shop.pay, {"id": 1})
        t.drain()
        t.advance("23h")
        assert ("remind", 1) not in shop.seen
        t.advance("2h")
        assert ("remind", 1) in shop.seen
        assert shop.seen.count("tick") == 25
        assert 24.9 < (t.now.timestamp() - began) / 3600 < 25.1
        with pytest.raises(ConfigurationError, match="positive duration"):
            t.advance("-1h")
    assert abs(wall() - time.time()) < 1


@pytest.mark.req("IN-13")
def test_a_message_that_keeps_failing_becomes_a_dead_letter_in_no_time(shop: Shop) -> None:
    with shop.under_test() as t:
        t.send(shop.count, {"id": -1}, id="bad")
        assert t.drain().failed == 1
        assert t.dead_letters == []
        t.advance("6h")
        (letter,) = t.dead_letters
        assert (letter.consumer, letter.message_id) == ("count", "bad")
        assert shop.seen.count(("count", -1)) > 5


@pytest.mark.req("IN-12")
def test_in_a_running_event_loop_it_is_async(shop: Shop) -> None:
    async def set_up(engine: AsyncEngine) -> None:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

    async def test() -> None:
        with pytest.raises(ConfigurationError, match="async with"), shop.under_test():
            pass
        async with shop.under_test(setup=set_up, services={"payments": FakePayments}) as t:
            await t.send(shop.pay, {"id": 3})
            assert (await t.drain()).succeeded == 2
            assert (await t.advance("25h")).succeeded > 25
            assert t.rows("SELECT id FROM customers") == [{"id": 3}]

    asyncio.run(test())


@pytest.mark.req("IN-12")
def test_one_test_leaves_nothing_to_the_next(shop: Shop) -> None:
    for _ in range(2):
        with shop.under_test() as t:
            t.send(shop.pay, {"id": 1}, id="one")
            assert t.drain().duplicates == 0
    with pytest.raises(RuntimeError, match="in setup"), shop.under_test(setup=_fail):
        pass
    with shop.under_test(), pytest.raises(ConfigurationError, match="under test already"), shop.under_test():
        pass
    with shop.under_test() as t:
        assert t.rows("SELECT * FROM customers") == []


def _fail(engine: Engine) -> None:
    raise RuntimeError("in setup")


@pytest.mark.req("IN-12")
def test_mistakes_of_a_test_say_what_to_do(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="takes what Onceward"):
        testing.app("shop:app")  # type: ignore[arg-type]
    with shop.under_test() as t, pytest.raises(ConfigurationError, match="its consumers are pay, ship"):
        t.send("nobody", {})
    with (
        pytest.raises(ConfigurationError, match="there is no service"),
        shop.under_test(services={"mail": 1}),
    ):
        pass

    @shop.app.consumer("memory://psycopg", contract=contract(consumer_id="psycopg"))
    def raw(order: dict[str, Any], db: psycopg.Connection) -> None: ...  # type: ignore[type-arg]

    with pytest.raises(ConfigurationError, match=r"testing\.app runs on SQLite"), shop.under_test():
        pass


@pytest.mark.req("IN-12")
def test_a_consumer_that_sends_to_itself_directly_ends_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Onceward("mirror")

    @app.consumer("memory://mirror", contract=None)
    def mirror(number: int) -> None:
        mirror.send(number + 1)

    with testing.app(app) as t:
        monkeypatch.setattr("onceward.testing.harness.MOST_MESSAGES", 50)
        t.send(mirror, 1)
        with pytest.raises(AssertionError, match="mirror consumed 50 messages"):
            t.drain()


@pytest.mark.req("IN-12")
@pytest.mark.filterwarnings("error")
def test_a_test_that_is_over_says_so(shop: Shop) -> None:
    with shop.under_test() as t:
        pass
    for use in (
        lambda: t.send("pay", {"id": 1}),
        t.drain,
        lambda: t.advance(1),
        lambda: t.rows("SELECT 1"),
        lambda: t.dead_letters,
        lambda: t.engine,
    ):
        with pytest.raises(ConfigurationError, match="the test of shop is over"):
            use()
    assert (t.published, t.effects) == ([], [])


@pytest.mark.req("IN-12")
@pytest.mark.filterwarnings("error")
def test_a_handler_cannot_use_the_test_that_waits_for_it() -> None:
    app = Onceward("nested")
    refused: list[ConfigurationError] = []

    @app.consumer("memory://threads", contract=None)
    def threads(number: int) -> None:
        drain()

    @app.consumer("memory://loop", contract=None)
    async def loop(number: int) -> None:
        drain()

    def drain() -> None:
        with pytest.raises(
            ConfigurationError, match="still running, in a handler or another thread"
        ) as found:
            t.drain()
        refused.append(found.value)

    with testing.app(app) as t:
        t.send(threads, 1)
        t.send(loop, 1)
        assert t.drain().succeeded == 2
    assert len(refused) == 2


@pytest.mark.req("IN-12")
def test_consumers_that_send_in_circles_end_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceward.testing.harness.MOST_ROUNDS", 20)
    app = Onceward("circle", database="sqlite:///circle.db")

    @app.consumer("memory://circle", contract=contract(consumer_id="circle"))
    def again(order: dict[str, Any], session: InboxSession) -> None:
        session.send(again, order)

    with testing.app(app) as t:
        t.send(again, {})
        with pytest.raises(AssertionError, match="without end"):
            t.drain()


@pytest.mark.req("IN-14")
def test_the_fixture_ends_with_its_test(onceward_app: Callable[..., testing.AppUnderTest]) -> None:
    app = Onceward("orm", database="sqlite:///orm.db")

    @app.consumer("redis://localhost:1/orders", contract=contract(consumer_id="orm"))
    def take(order: dict[str, Any], db: Session) -> None:
        if order["total"] < 0:
            raise TransactionException("refused", category=ExceptionCategory.BUSINESS)
        db.add(Order(id=order["id"], total=order["total"], customer_id=1))

    t = onceward_app(app, setup=Base.metadata.create_all)
    t.send(take, {"id": 1, "total": 5})
    t.send(take, {"id": 2, "total": -5})
    report = t.drain()
    assert (report.succeeded, report.failed) == (1, 1)
    assert t.rows("SELECT id, total FROM orders") == [{"id": 1, "total": 5}]
    assert [letter.consumer for letter in t.dead_letters] == ["orm"]
