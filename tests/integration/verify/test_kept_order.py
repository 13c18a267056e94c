"""Consumers with order_by: events of one key neither overtake one another nor run at the same time."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

from onceward import Contract, Onceward
from onceward.failures import RetryLater
from onceward.verify import ScenarioStatus, examine_consumer

app = Onceward("bank", database="sqlite:///bank.db")


def setup(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE accounts (name TEXT PRIMARY KEY, balance INTEGER)"))
        connection.execute(text("INSERT INTO accounts VALUES ('ann', 0), ('bob', 0), ('all', 0)"))


def event(number: int, customer: str) -> dict[str, Any]:
    return {"tracking_id": f"order-{number}", "payload": {"customer": customer, "number": number}}


EVENTS = [event(1, "ann"), event(2, "ann"), event(3, "bob")]


def contract(name: str) -> Contract:
    return Contract(
        consumer_id=name, event_types=["*"], owner_team="bank", idempotency_mechanism="one transaction"
    )


def set_balance(session: Any, name: str, balance: int) -> None:
    session.execute(
        "UPDATE accounts SET balance = :balance WHERE name = :name", {"balance": balance, "name": name}
    )


@app.consumer("sqlite:///a.db", contract=contract("last"), order_by="customer")
def last(order: dict[str, Any], session: Any) -> None:
    set_balance(session, order["customer"], order["number"])


@app.consumer("sqlite:///b.db", contract=contract("passed"), order_by="customer", on_dead="continue")
def passed(order: dict[str, Any], session: Any) -> None:
    set_balance(session, order["customer"], order["number"])


@app.consumer("sqlite:///c.db", contract=contract("shared"), order_by="customer")
def shared(order: dict[str, Any], session: Any) -> None:
    set_balance(session, "all", order["number"])


@app.consumer("sqlite:///d.db", contract=contract("adds"), order_by="customer")
def adds(order: dict[str, Any], session: Any) -> None:
    name = order["customer"]
    before = session.execute_scalar("SELECT balance FROM accounts WHERE name = :name", {"name": name})
    set_balance(session, name, before + order["number"])


@app.consumer("sqlite:///e.db", contract=contract("adds_shared"), order_by="customer")
def adds_shared(order: dict[str, Any], session: Any) -> None:
    before = session.execute_scalar("SELECT balance FROM accounts WHERE name = 'all'")
    set_balance(session, "all", before + order["number"])


@app.consumer("sqlite:///f.db", contract=contract("waits"), order_by="customer")
def waits(order: dict[str, Any], session: Any) -> None:
    """The first event of ann waits for bob, and the second behind it."""
    bob = session.execute_scalar("SELECT balance FROM accounts WHERE name = 'bob'")
    if order["number"] == 1 and not bob:
        raise RetryLater("bob comes first", after="1s")
    set_balance(session, order["customer"], order["number"])


def result_of(consumer: Any, scenario: str, **given: Any) -> Any:
    given = {"events": EVENTS, **given}
    return examine_consumer(consumer, setup=setup, only=[scenario], **given)[scenario]


@pytest.mark.req("CC-192")
@pytest.mark.parametrize(
    ("consumer", "expected"),
    [
        (last, ScenarioStatus.PASSED),
        (passed, ScenarioStatus.FAILED),
        (shared, ScenarioStatus.FAILED),
    ],
)
def test_events_of_one_key_keep_their_order(consumer: Any, expected: ScenarioStatus) -> None:
    result = result_of(consumer, "order")
    assert result.result is expected, str(result)


@pytest.mark.req("CC-192")
def test_events_behind_one_that_waits_wait_too() -> None:
    events = [event(3, "bob"), event(1, "ann"), event(2, "ann")]
    result = result_of(waits, "order", events=events)
    assert result.result is ScenarioStatus.PASSED, str(result)


@pytest.mark.req("CC-192")
def test_events_of_a_single_key_have_no_other_order() -> None:
    result = result_of(shared, "order", events=EVENTS[:2])
    assert result.result is ScenarioStatus.SKIPPED
    assert "they have one key; pass some of another" in result.note


@pytest.mark.req("CC-192")
@pytest.mark.parametrize("scenario", ["lost-updates", "side-by-side"])
def test_events_of_one_key_never_meet(scenario: str, postgres_url: str) -> None:
    right = result_of(adds, scenario, database=postgres_url)
    assert right.result is ScenarioStatus.PASSED, str(right)
    wrong = result_of(adds_shared, scenario, database=postgres_url)
    assert wrong.result is ScenarioStatus.FAILED, str(wrong)
    alone = result_of(adds_shared, scenario, database=postgres_url, events=EVENTS[:2])
    assert alone.result is ScenarioStatus.SKIPPED
