"""Limits: what can be written down, and what is refused with the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, Field

from onceward import Limit, Onceward
from onceward.app.build import middleware_of
from onceward.inspection.conduct import conduct_of
from onceward.limits.limit import KeyProblem, KeyReader

DATABASE = "sqlite:///shop.db"


class Order(msgspec.Struct, rename="camel"):
    customer_id: str


class Invoice(BaseModel):
    customer_id: int = Field(alias="customer")


@dataclasses.dataclass
class Letter:
    customer_id: str


class Parcel(TypedDict):
    customer_id: str


@pytest.mark.req("LI-01")
@pytest.mark.parametrize(
    ("rate", "every"),
    [("10/s", 0.1), ("0.5/s", 2.0), ("1/h", 3600.0), ("100/m", 0.6), (" 10 / 30s ", 3.0), ("5/d", 17280.0)],
)
def test_a_rate_is_a_number_per_time(rate: str, every: float) -> None:
    assert Limit(rate=rate).every == pytest.approx(every)


@pytest.mark.req("LI-05")
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({}, "needs a rate, as in Limit"),
        ({"rate": "fast"}, "such as '10/s'"),
        ({"rate": "-1/s"}, "positive number of starts per time"),
        ({"rate": "0/s"}, "positive number of starts per time"),
        ({"rate": "10"}, "such as '10/s'"),
        ({"rate": 10}, "such as '10/s'"),
        ({"rate": "10/0s"}, "positive number"),
        ({"rate": "1000000/s"}, "between 100000/s and 1/30d"),
        ({"rate": "1/60d"}, "between 100000/s and 1/30d"),
        ({"concurrency": 0}, "a whole number from 1, not 0; to stop a consumer, use `onceward pause`"),
        ({"concurrency": -2}, "a whole number from 1"),
        ({"concurrency": True}, "a whole number from 1"),
        ({"concurrency": 2.5}, "a whole number from 1"),
        ({"concurrency": 10**7}, "is more than 1000000; leave it out"),
        ({"rate": "1/s", "by": 7}, "the name of a field of the payload, or a function"),
        ({"rate": "1/s", "by": ""}, "the name of a field of the payload, or a function"),
        ({"rate": "1/s", "by": "customer..id"}, "the name of a field of the payload, or a function"),
        ({"rate": "1/s", "by": lambda: "a"}, "gets one argument, the payload"),
        ({"rate": "1/s", "by": lambda order, more: "a"}, "gets one argument, the payload"),
    ],
)
def test_what_is_not_a_limit_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Limit(**wrong)


@pytest.mark.req("LI-05")
def test_a_key_comes_from_a_plain_function() -> None:
    async def later(payload: Any) -> str:
        return "a"

    def lazy(payload: Any) -> Any:
        yield "a"

    for wrong in (later, lazy):
        with pytest.raises(ValueError, match="make it a plain `def` without `yield`"):
            Limit(rate="1/s", by=wrong)


@pytest.mark.req("LI-05")
@pytest.mark.parametrize("model", [Order, Invoice, Letter, Parcel])
def test_an_unknown_field_is_refused_at_the_decoration(model: Any) -> None:
    app = Onceward("shop", database=DATABASE)

    def charge(order: Any) -> None: ...

    charge.__annotations__["order"] = model
    with pytest.raises(
        ValueError, match=r"charge is limited by 'costumer'.* has no such field; it has customer_id"
    ):
        app.consumer("sqlite:///orders.db", limit=Limit(rate="1/s", by="costumer"))(charge)
    app.consumer("sqlite:///orders.db", limit=Limit(rate="1/s", by="customer_id"))(charge)


@pytest.mark.req("LI-05")
def test_what_cannot_be_limited_is_refused_at_the_decoration() -> None:
    app, without = Onceward("shop", database=DATABASE), Onceward("shop")

    def refused(text: str, app: Onceward = app, model: Any = dict, **more: Any) -> None:
        def charge(order: Any) -> None: ...

        charge.__annotations__["order"] = model
        with pytest.raises(ValueError, match=text):
            app.consumer("sqlite:///orders.db", **more)(charge)

    refused("limit must be a Limit, as in limit=Limit", limit="10/s")
    refused("give it one: Onceward.*ONCEWARD_DATABASE", app=without, limit=Limit(rate="1/s"))
    refused(
        r"'x', but its payload is str, which has no fields \(`by` may also be a function",
        model=str,
        limit=Limit(rate="1/s", by="x"),
    )
    nested = Limit(rate="1/s", by="customer_id.x")
    refused("'customer_id.x', but 'customer_id' is str, which has no fields", model=Order, limit=nested)
    retries = {"steps": {"process": {"retry": {"max_attempts": 3}}}}
    refused("makes 3 attempts in a row.*failures=", limit=Limit(rate="1/s"), policy=retries)

    @app.consumer("sqlite:///orders.db", limit=Limit(concurrency=1), policy=retries)
    def charge(order: dict[str, Any]) -> None: ...


@pytest.mark.req("LI-05")
@pytest.mark.parametrize(
    ("by", "payload", "text"),
    [
        ("customer_id", {}, "'customer_id', but the payload of this message has no such field; send it"),
        ("customer_id", ["a"], "has no such field"),
        ("customer_id", {"customer_id": None}, "which is None in this message"),
        ("customer_id", {"customer_id": ""}, "which is empty in this message"),
        ("customer.id", {"customer": "secret"}, "'customer.id', which is None in this message"),
        ("customer.id", {"secret": 1}, "has no such field"),
        (
            "customer_id",
            {"customer_id": {"secret": 1}},
            "which is a dict in this message; it must be text or a number",
        ),
        (lambda order: order["missing"], {"secret": 1}, "raised KeyError for this message"),
        (
            lambda order: 10 ** order["zeros"],
            {"zeros": 5000},
            "which cannot be written as text in this message",
        ),
        (lambda order: (10 ** order["zeros"], 1), {"zeros": 5000}, "which cannot be written as text"),
    ],
)
def test_a_message_without_a_key_says_so_and_quotes_nothing(by: Any, payload: Any, text: str) -> None:
    with pytest.raises(KeyProblem, match=text) as caught:
        KeyReader(Limit(rate="1/s", by=by), "charge").key_of(payload)
    assert "secret" not in str(caught.value)


@pytest.mark.req("LI-04")
@pytest.mark.parametrize(
    ("by", "model", "payload", "key"),
    [
        ("customer_id", None, {"customer_id": 7}, "7"),
        ("customer.id", None, {"customer": {"id": 7}}, "7"),
        ("customer.id", dict, {"customer.id": 7}, "7"),
        ("customer_id", Order, {"customerId": "anna"}, "anna"),
        ("customer_id", Invoice, {"customer": 7}, "7"),
        (lambda order: (order["zone"], 7), None, {"zone": "a"}, "('a', '7')"),
        (None, None, "anything", ""),
    ],
)
def test_a_key_is_a_field_or_what_a_function_returns(
    by: str | Callable[[Any], Any] | None, model: Any, payload: Any, key: str
) -> None:
    assert KeyReader(Limit(rate="1/s", by=by), "charge", model).key_of(payload) == key


def test_keys_that_a_database_cannot_store_are_stored_as_their_digests() -> None:
    keys = KeyReader(Limit(rate="1/s", by="id"), "charge")
    found = {keys.key_of({"id": text}) for text in ("a\0b", "a\0c", "\ud800", "x" * 10_000, "line\nline")}
    assert len(found) == 5
    assert all(each.startswith("sha256:") for each in found)


@pytest.mark.req("LI-07")
def test_an_unlimited_consumer_pays_nothing() -> None:
    app = Onceward("shop", database=DATABASE)

    @app.consumer("sqlite:///letters.db", contract=None)
    def greet(letter: dict[str, Any]) -> None: ...

    @app.consumer(
        "sqlite:///orders.db", contract=None, limit=Limit(rate="10/s", concurrency=5, by="customer_id")
    )
    def charge(order: dict[str, Any]) -> None: ...

    names = {name: [each.name for each in middleware_of(app, app.consumers[name])] for name in app.consumers}
    assert names["greet"] == ["failure rules", "dead letters"]
    assert names["charge"] == ["failure rules", "limit", "limit of the source", "dead letters"]
    assert "limit" not in dict(conduct_of(app, app.consumers["greet"]))
    said = dict(conduct_of(app, app.consumers["charge"]))["limit"]
    assert said == "10/s and 5 at once, for each customer_id, in all processes together"
