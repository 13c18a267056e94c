"""Two events at the same time in one process: what a handler shares between them changes no outcome, or is found."""

from __future__ import annotations

import threading
from typing import Any, Self

import pytest
from pydantic import BaseModel, model_validator
from sqlalchemy import text

from onceward import AsyncConsumerTask, ConsumerTask, Onceward, Transaction
from onceward.verify import ScenarioStatus, examine_consumer
from tests.verification.consumers import EVENTS, INSERT, contract, setup, values

pytestmark = pytest.mark.req("CC-141")
TOUCH = "UPDATE bills SET total = total WHERE id = 'nobody'"
CURRENT: dict[str, Any] = {}
LOCK = threading.Lock()


class OnSelf(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        self.current = values(transaction)
        session.execute(TOUCH)
        session.execute(INSERT, self.current)


class InTheModule(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:
        CURRENT["row"] = values(transaction)
        await session.execute(TOUCH)
        await session.execute(INSERT, CURRENT["row"])


class AroundAnEffect(ConsumerTask):
    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        CURRENT["row"] = values(transaction)
        session.effect("look", lambda _: None)
        session.execute(INSERT, CURRENT["row"])


class Locked(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        with LOCK:
            self.current = values(transaction)
            session.execute(TOUCH)
            session.execute(INSERT, self.current)


class Local(AsyncConsumerTask):
    contract = contract(mode="effectful")

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:
        self.seen = transaction.id  # which nothing reads
        current = values(transaction)

        async def look(_: str) -> None: ...

        await session.effect("look", look)
        await session.execute(INSERT, current)


@pytest.mark.usual("OnSelf")
@pytest.mark.parametrize("consumer", [OnSelf, InTheModule])
def test_state_that_another_event_replaces_is_found(consumer: Any, postgres_url: str) -> None:
    report = examine_consumer(consumer, EVENTS, setup=setup, database=postgres_url, only=["side-by-side"])
    assert report["side-by-side"].result is ScenarioStatus.FAILED
    assert "at the same time in one process" in str(report["side-by-side"])


def test_so_it_is_around_an_effect_on_sqlite() -> None:
    report = examine_consumer(AroundAnEffect, EVENTS, setup=setup, only=["side-by-side"])
    assert report["side-by-side"].result is ScenarioStatus.FAILED


@pytest.mark.usual("Locked")
@pytest.mark.parametrize("consumer", [Locked, Local])
def test_a_lock_or_local_variables_are_right(consumer: Any, postgres_url: str) -> None:
    report = examine_consumer(consumer, EVENTS, setup=setup, database=postgres_url, only=["side-by-side"])
    assert report["side-by-side"].result is ScenarioStatus.PASSED, str(report)


def heads(engine: Any) -> None:
    setup(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE heads (id SERIAL PRIMARY KEY, event TEXT)"))
        connection.execute(text("CREATE TABLE items (head INTEGER REFERENCES heads (id), event TEXT)"))


class Newest(ConsumerTask):
    contract = contract()
    find = "SELECT max(id) FROM heads"

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.execute("INSERT INTO heads (event) VALUES (:id)", {"id": transaction.id})
        head = session.execute_scalar(self.find)
        session.execute("INSERT INTO items VALUES (:head, :id)", {"head": head, "id": transaction.id})


class Own(Newest):
    find = "SELECT currval('heads_id_seq')"


@pytest.mark.req("CC-144")
@pytest.mark.parametrize(("consumer", "found"), [(Newest, True), (Own, False)])
def test_a_row_that_refers_to_that_of_another_event_is_found(
    consumer: Any, found: bool, postgres_url: str
) -> None:
    report = examine_consumer(consumer, EVENTS, setup=heads, database=postgres_url, only=["side-by-side"])
    assert report["side-by-side"].result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED)
    assert ("items.head → heads" in str(report)) is found


class Bill(BaseModel):
    total: int

    @model_validator(mode="after")
    def keep(self) -> Self:
        CURRENT["bill"] = self
        return self


bills = Onceward("bills", database="sqlite:///bills.db")


@bills.consumer("memory://kept", contract=contract(consumer_id="kept"), commit="each")
def kept_by_the_model(bill: Bill, session: Any) -> None:
    session.execute(INSERT, {"id": "any", **CURRENT["bill"].model_dump()})


@bills.consumer("memory://given", contract=contract(consumer_id="given"), commit="each")
def given_by_the_model(bill: Bill, session: Any) -> None:
    session.execute(INSERT, {"id": "any", **bill.model_dump()})


@bills.consumer("memory://grouped", contract=contract(consumer_id="grouped"))
def kept_by_the_model_in_groups(bill: Bill, session: Any) -> None:
    session.execute(INSERT, {"id": "any", **CURRENT["bill"].model_dump()})


@pytest.mark.usual("kept_by_the_model", "given_by_the_model")
@pytest.mark.parametrize(
    ("consumer", "expected"),
    [
        (kept_by_the_model, ScenarioStatus.FAILED),
        (given_by_the_model, ScenarioStatus.PASSED),
        (kept_by_the_model_in_groups, ScenarioStatus.SKIPPED),
    ],
)
def test_state_of_what_runs_before_the_transaction_is_found_in_a_file(
    consumer: Any, expected: ScenarioStatus
) -> None:
    report = examine_consumer(consumer, EVENTS, setup=setup, only=["side-by-side"])
    assert report["side-by-side"].result is expected, str(report)
