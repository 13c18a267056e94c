"""The event type of what is sent to a consumer by name: the one that its contract accepts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from onceward import Contract, Onceward, Transaction
from onceward.app.build import open_task
from onceward.connectors.codec import decode
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.inbox import Inbox
from onceward.outbox import Delayed, OutboxError
from onceward.task.exceptions import InputException
from tests.support.world import World

pytestmark = pytest.mark.req("OB-31")


@dataclass
class Order:
    id: int


@dataclass
class Named:
    id: int
    event_type: str


def contract(name: str, *types: str) -> Contract:
    return Contract(
        consumer_id=name, event_types=types, owner_team="shop", idempotency_mechanism="its record"
    )


class Shop:
    """Consumers of one event type, of two, of all, and one without a contract."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app = Onceward("shop", database=f"sqlite:///{folder}/shop.db")
        self.engine = self.app.create_engine()
        Inbox(self.engine).migrate()
        self.one = self.consumer("one", "placed")
        self.two = self.consumer("two", "placed", "paid")
        self.all = self.consumer("all", "*")
        self.none = self.consumer("none")

    def consumer(self, name: str, *types: str) -> Any:
        def inside(order: Any, session: Any) -> None: ...

        def outside(order: Any) -> None: ...

        function = inside if types else outside
        function.__name__ = name
        return self.app.consumer(self.url(name), contract=contract(name, *types) if types else None)(function)

    def url(self, name: str) -> str:
        return f"sqlite:///{self.folder}/{name}.db"

    def waiting(self, name: str) -> list[Any]:
        with Address(self.url(name)).open(asynchronous=False) as queue:
            return [each.metadata.get("event_type") for each in queue.fetch_transactions(100)]

    def publish(self, target: Any, payload: Any, **given: Any) -> list[Any]:
        """The event types of all that the outbox holds."""
        with self.engine.begin() as connection:
            self.app.outbox(connection).send(target, payload, **given)
        return self.held()

    def held(self) -> list[Any]:
        with self.engine.connect() as connection:
            bodies = connection.execute(text("SELECT body FROM onceward_outbox ORDER BY seq")).scalars()
            return [decode(bytes(each)).metadata.get("event_type") for each in bodies]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.mark.parametrize("payload", [{"id": 1}, Order(1), [1], None, {"event_type": None}], ids=repr)
def test_the_outbox_sends_the_type_that_the_contract_accepts(shop: Shop, payload: Any) -> None:
    assert shop.publish(shop.one, payload) == ["placed"]


@pytest.mark.parametrize("payload", [{"event_type": "paid"}, Named(1, "paid")], ids=repr)
def test_the_type_in_a_payload_counts(shop: Shop, payload: Any) -> None:
    assert shop.publish(shop.one, payload) == [None]
    assert shop.publish(shop.two, payload) == [None, None]


def test_the_type_in_the_headers_counts(shop: Shop) -> None:
    assert shop.publish(shop.one, {}, headers={"event_type": "paid"}) == ["paid"]
    assert shop.publish(shop.two, {}, headers={"event_type": "paid"}) == ["paid", "paid"]


def test_other_headers_stay(shop: Shop) -> None:
    assert shop.publish(shop.one, {}, headers={"shop": 7}) == ["placed"]


def test_no_type_is_made_up(shop: Shop) -> None:
    for target in (shop.all, shop.none, shop.url("one")):
        shop.publish(target, {"id": 1})
    assert shop.held() == [None] * 3


def test_the_outbox_refuses_a_message_that_the_contract_would_refuse(shop: Shop) -> None:
    with pytest.raises(OutboxError) as raised:
        shop.publish(shop.two, {"id": 1})
    assert str(raised.value) == (
        "nothing was sent: two accepts several event types, placed, paid, and the message has none; name it: "
        "headers={'event_type': …}"
    )
    assert shop.held() == []


def test_a_handler_sends_the_type(shop: Shop) -> None:
    """The way that the page about the outbox shows: both consumers apply what they get."""

    @shop.app.consumer(shop.url("charge"), contract=contract("charge", "placed"))
    def charge(order: dict[str, Any], session: Any) -> None:
        session.send(shop.one, order, key="ann")

    charge.send({"id": 1})
    with open_task(shop.app, shop.app.consumers["charge"]) as task:
        task.consume_transactions(shop.app.consumers["charge"].policy)
    assert shop.held() == ["placed"]


def test_send_adds_the_type(shop: Shop, world: World) -> None:
    def send(function: Any, message: Any) -> None:
        asyncio.run(function.send_async(message)) if world.asynchronous else function.send(message)

    for message in ({"id": 1}, Order(1), {"event_type": "paid"}, Transaction(payload={})):
        send(shop.one, message)
    assert shop.waiting("one") == ["placed", "placed", None, None]
    with pytest.raises(ConfigurationError) as raised:
        send(shop.two, {"id": 1})
    assert str(raised.value) == (
        "nothing was sent: two accepts several event types, placed, paid, and the message has none; send "
        "Transaction(payload=…, metadata={'event_type': …})"
    )
    send(shop.two, {"event_type": "paid"})
    assert shop.waiting("two") == [None]


def producing(shop: Shop, world: World, sink: Any) -> Callable[..., Any]:
    if world.asynchronous:

        async def place(*payloads: Any) -> Any:
            for each in payloads:
                yield each

        shop.app.producer(sink)(place)
        return lambda *payloads: asyncio.run(shop.app.produce_async(place, *payloads))

    def place_blocking(*payloads: Any) -> Any:
        yield from payloads

    shop.app.producer(sink)(place_blocking)
    return lambda *payloads: shop.app.produce(place_blocking, *payloads)


def test_a_producer_for_a_consumer_adds_the_type(shop: Shop, world: World) -> None:
    place = producing(shop, world, shop.one)
    place({"id": 1}, Order(2), {"event_type": "paid"}, Transaction(payload={}), Delayed({"id": 3}, delay=60))
    assert shop.waiting("one") == ["placed", "placed", None, None]
    assert shop.held() == ["placed"]


def test_a_producer_for_a_consumer_of_several_types_says_which(shop: Shop, world: World) -> None:
    place = producing(shop, world, shop.two)
    with pytest.raises(InputException, match="two accepts several event types, placed, paid"):
        place({"id": 1})
    assert shop.waiting("two") == []


def test_a_producer_for_a_url_adds_none(shop: Shop, world: World) -> None:
    producing(shop, world, shop.url("one"))({"id": 1})
    assert shop.waiting("one") == [None]
