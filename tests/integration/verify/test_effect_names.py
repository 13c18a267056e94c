"""A consumer that uses one name for several effects does not pass."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine

from onceward import ConsumerTask, Contract, Transaction
from onceward.verify import examine_consumer

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
