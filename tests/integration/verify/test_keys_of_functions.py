"""Functions for order_by and Limit(by=…): each process must find the same key, and they do nothing else."""

from __future__ import annotations

import urllib.request
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from sqlalchemy import Engine, text

from onceward import Contract, Onceward
from onceward.limits import Limit
from onceward.verify import ScenarioStatus, examine_consumer

pytestmark = pytest.mark.req("CC-086")

app = Onceward("shop", database="sqlite:///shop.db")
EVENTS = [
    {"tracking_id": f"order-{n}", "payload": {"customer": name}} for n, name in enumerate(("ann", "bob"))
]
NOTES = Path(gettempdir()) / "onceward-notes-of-keys"
_numbers = count()


def setup(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (customer TEXT)"))


def by_customer(order: dict[str, Any]) -> str:
    return str(order["customer"])


def by_hash(order: dict[str, Any]) -> int:
    return hash(order["customer"])


def by_counter(order: dict[str, Any]) -> int:
    return next(_numbers)


def with_a_note(order: dict[str, Any]) -> str:
    NOTES.touch()
    return by_customer(order)


def with_a_request(order: dict[str, Any]) -> str:
    with suppress(OSError):
        urllib.request.urlopen("http://127.0.0.1:9/", timeout=1)
    return by_customer(order)


def consumer(name: str, **options: Any) -> Any:
    contract = Contract(
        consumer_id=name, event_types=["*"], owner_team="shop", idempotency_mechanism="one transaction"
    )

    def process(order: dict[str, Any], session: Any) -> None:
        session.execute("INSERT INTO orders VALUES (:customer)", order)

    process.__name__ = process.__qualname__ = name
    return app.consumer(f"sqlite:///{name}.db", contract=contract, **options)(process)


right = consumer("right", order_by=by_customer, limit=Limit(rate="10/s", by=by_customer))
hashed = consumer("hashed", order_by=by_hash)
counted = consumer("counted", order_by=by_counter)
limited = consumer("limited", limit=Limit(rate="10/s", by=by_hash))
noting = consumer("noting", order_by=with_a_note)
limited_noting = consumer("limited_noting", limit=Limit(rate="10/s", by=with_a_note))
asking = consumer("asking", order_by=with_a_request)


def examine(given: Any) -> Any:
    return examine_consumer(
        given, events=EVENTS, setup=setup, only=["clean", "interpreters", "early-effects", "outside-calls"]
    )


def test_a_key_of_the_payload_passes() -> None:
    report = examine(right)
    assert {each.name: each.result for each in report.scenarios if each.result is ScenarioStatus.FAILED} == {}


@pytest.mark.parametrize(
    ("given", "scenario", "what"),
    [
        (hashed, "interpreters", "order_by gives event 'order-0' the key '"),
        (counted, "clean", "order_by gives event 'order-0' the key '0' and then the key '1'"),
        (limited, "interpreters", "Limit(by=…) gives event 'order-0' the key '"),
    ],
)
def test_a_key_that_depends_on_the_process_is_found(given: Any, scenario: str, what: str) -> None:
    report = examine(given)
    assert report[scenario].result is ScenarioStatus.FAILED, str(report)
    assert what in str(report[scenario])


@pytest.mark.parametrize("given", [noting, limited_noting, asking])
def test_so_is_what_the_function_does_outside(given: Any) -> None:
    report = examine(given)
    assert report["early-effects"].result is ScenarioStatus.FAILED, str(report)
    assert "before the inbox knew whether the event is new" in str(report["early-effects"])
