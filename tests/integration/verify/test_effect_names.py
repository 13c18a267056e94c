"""The names and keys of effects, in a verification: one for each call, and the same for each copy of an event."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import UTC, date, datetime
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from onceward import ConsumerTask, Contract, Middleware, Transaction
from onceward.connectors import MemoryConnector
from onceward.verify import ScenarioStatus, examine_consumer

CONTRACT = Contract(
    consumer_id="shipping",
    event_types=["order"],
    owner_team="shop",
    idempotency_mechanism="the carrier honors keys",
    mode="effectful",
)


class ShipsTheFirst(ConsumerTask):
    contract = CONTRACT

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        for item in transaction.payload["items"]:
            session.effect("ship", lambda key, item=item: item)
        session.execute("INSERT INTO shipped VALUES (:id)", {"id": transaction.id})


class HidesIt(ConsumerTask):
    contract = CONTRACT

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        for item in transaction.payload["items"]:
            with suppress(Exception):
                session.effect("ship", lambda key, item=item: item)
        session.execute("INSERT INTO shipped VALUES (:id)", {"id": transaction.id})


def setup(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE shipped (id TEXT)")


@pytest.mark.req("CC-056")
@pytest.mark.parametrize("consumer", [ShipsTheFirst, HidesIt])
def test_a_loop_over_items_with_one_name_fails_and_says_to_name_each(consumer: Any) -> None:
    events = [Transaction(id="o1", payload={"items": [1, 2]}, metadata={"event_type": "order"})]
    report = examine_consumer(consumer, events, setup=setup, only=("clean",))
    assert not report.passed
    assert 'Name each, such as f"ship-{item.id}"' in str(report)


class Carrier:
    def ship(self, item: int, key: str = "") -> None: ...


class ShipsByDay(ConsumerTask):
    contract = CONTRACT

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.effect(self.name_of(transaction), lambda key: self.services["carrier"].ship(1, key))
        session.execute("INSERT INTO shipped VALUES (:id)", {"id": transaction.id})

    def name_of(self, transaction: Transaction) -> str:
        return f"ship-{date.today()}"


class ShipsByHour(ShipsByDay):
    def name_of(self, transaction: Transaction) -> str:
        return f"ship-{datetime.now(UTC):%H}-{time.time() // 3600}"


class ShipsByCreation(ShipsByDay):
    def name_of(self, transaction: Transaction) -> str:
        return f"ship-{transaction.created_at}"


class ShipsByHost(ShipsByDay):
    def name_of(self, transaction: Transaction) -> str:
        return f"ship-{socket.gethostname()}"


class Ships(ShipsByDay):
    def name_of(self, transaction: Transaction) -> str:
        return "ship"


class Sends(ShipsByDay):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.effect("send", lambda key: self.services["sink"].dispatch_transactions([self.message(key)]))
        session.execute("INSERT INTO shipped VALUES (:id)", {"id": transaction.id})

    def message(self, key: str) -> Transaction:
        return Transaction(payload=1)


class SendsWithKey(Sends):
    def message(self, key: str) -> Transaction:
        return Transaction(id=f"{key}-1", payload=1)


def services_for_shipping(_: Engine) -> dict[str, Any]:
    return {"carrier": Carrier(), "sink": MemoryConnector()}


def ship(consumer: Any, scenario: str) -> Any:
    events = [Transaction(id="o1", payload={"items": [1]}, metadata={"event_type": "order"})]
    return examine_consumer(
        consumer, events, setup=setup, services=services_for_shipping, outside=["carrier"], only=(scenario,)
    )[scenario]


@pytest.mark.usual("ShipsByDay", "SendsWithKey")
@pytest.mark.req("CC-104")
@pytest.mark.parametrize(
    ("consumer", "expected"),
    [
        (ShipsByDay, "its effects differ"),
        pytest.param(ShipsByHour, "its effects differ", marks=pytest.mark.long),
        pytest.param(ShipsByCreation, "its effects differ", marks=pytest.mark.long),
        (ShipsByHost, "its effects differ"),
        (Sends, "sends a message with another id"),
        (Ships, ""),
        (SendsWithKey, ""),
    ],
)
def test_a_copy_on_another_day_and_host_has_the_same_effects(consumer: Any, expected: str) -> None:
    result = ship(consumer, "interpreters")
    assert result.result is (ScenarioStatus.FAILED if expected else ScenarioStatus.PASSED), result
    assert expected in str(result)


class ShipsWithTheTime(Ships):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.effect("ship", lambda key: self.services["carrier"].ship(1, f"{key}-{self.more()}"))

    def more(self) -> Any:
        return datetime.now(UTC).second


class ShipsWithChance(ShipsWithTheTime):
    def more(self) -> Any:
        return uuid4()


class ShipsWithANumber(ShipsWithTheTime):
    def more(self) -> Any:
        return 2


ITEMS = ("apple", "pear", "plum", "quince", "grape", "fig")


class ShipsByPlaceInASet(Ships):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        for number, item in enumerate(set(ITEMS)):
            session.effect(
                f"ship-{number}", lambda key, item=item: self.services["carrier"].ship(item, key=key)
            )


class ShipsInTheOrderOfASet(Ships):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        for item in set(ITEMS):
            session.effect(
                f"ship-{item}", lambda key, item=item: self.services["carrier"].ship(item, key=key)
            )


@pytest.mark.usual("ShipsByPlaceInASet", "ShipsWithANumber")
@pytest.mark.req("CC-152")
@pytest.mark.parametrize(
    ("consumer", "expected"),
    [
        (ShipsWithTheTime, "another key: "),
        pytest.param(ShipsWithChance, "another key: ", marks=pytest.mark.long),
        (ShipsWithANumber, ""),
        (ShipsByPlaceInASet, "not by its place in a set"),
        (ShipsInTheOrderOfASet, ""),
    ],
)
def test_a_repetition_has_the_same_key_for_the_same_call(consumer: Any, expected: str) -> None:
    result = ship(consumer, "interpreters")
    assert result.result is (ScenarioStatus.FAILED if expected else ScenarioStatus.PASSED), result
    assert expected in str(result)


class ShipsWithoutKey(Ships):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.effect("ship", lambda key: self.services["carrier"].ship(1))


class ShipsTwice(Ships):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.effect("ship", lambda key: [self.services["carrier"].ship(item, key) for item in (1, 2)])


class ShipsWithKeyOfItsOwn(Ships):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.effect("ship", lambda key: self.services["carrier"].ship(1, transaction.id))


class ShipsOnPurpose(Ships):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.effect("ship", lambda _: self.services["carrier"].ship(1))


@pytest.mark.usual("ShipsTwice", "ShipsWithKeyOfItsOwn")
@pytest.mark.req("CC-104")
@pytest.mark.parametrize(
    ("consumer", "expected"),
    [
        (ShipsWithoutKey, "never reads the key"),
        (ShipsTwice, "twice with one key"),
        (ShipsWithKeyOfItsOwn, ""),
        (ShipsOnPurpose, ""),
    ],
)
def test_a_call_gets_its_key_and_no_other_call_does(consumer: Any, expected: str) -> None:
    result = ship(consumer, "outside-calls")
    assert result.result is (ScenarioStatus.FAILED if expected else ScenarioStatus.PASSED), result
    assert expected in str(result)


class Hides(Ships):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        with suppress(ConnectionError, TimeoutError):
            session.effect("ship", lambda key: self.services["carrier"].ship(1, key))
        session.execute("INSERT INTO shipped VALUES (:id)", {"id": transaction.id})


class HidesInMiddleware(Middleware):
    def wrap_step(self, step: Any, call: Any) -> Any:
        async def go(*given: Any) -> Any:
            with suppress(Exception):
                return await call(*given)

        return go if step.name == "process" else call


class IsHidden(Ships):
    middleware = (HidesInMiddleware(),)


@pytest.mark.req("CC-100", "CC-101")
@pytest.mark.parametrize(
    ("consumer", "expected"),
    [(Hides, "swallowed: the handler caught it"), (IsHidden, "swallowed by middleware")],
)
def test_a_failure_that_is_swallowed_is_found(consumer: Any, expected: str) -> None:
    assert expected in str(ship(consumer, "exceptions"))
