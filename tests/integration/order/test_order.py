"""Order by key in an app: what dead letters hold, what releases them, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from onceward import Contract, Onceward, Refuse
from onceward.app.build import open_task, open_task_async
from onceward.connectors.urls import Address
from onceward.deadletters import DeadLetters, Filter, Rca
from onceward.errors import ConfigurationError
from onceward.inspection.conduct import conduct_of
from onceward.transaction import Transaction
from tests.support.commands import onceward
from tests.support.schema import new_schema
from tests.support.wait import until

CONTRACT = Contract(
    consumer_id="billing",
    event_types=["*"],
    owner_team="tests",
    idempotency_mechanism="record and row together",
)
FIXED = Rca(category="business", root_cause="a wrong card", fix_ref="v2")
POLICY = {"loop": {"streaming": False}}


class Shop:
    """A consumer with order whose handler refuses what the test says."""

    def __init__(self, database: str, source: str, *, asynchronous: bool, **order: Any) -> None:
        self.app = Onceward("shop", database=database)
        self.database = database
        self.asynchronous = asynchronous
        self.done: list[str] = []
        self.refuses: set[str] = set()
        with_ = {"policy": POLICY, "contract": CONTRACT, "order_by": "customer", **order}

        def work(order: dict[str, Any]) -> None:
            if order["name"] in self.refuses:
                raise Refuse("no such card")
            self.done.append(order["name"])

        if asynchronous:

            @self.app.consumer(source, **with_)
            async def charge(order: dict[str, Any], session: Any) -> None:
                work(order)

        else:

            @self.app.consumer(source, **with_)
            def charge(order: dict[str, Any], session: Any) -> None:
                work(order)

        self.consumer = self.app.consumers["charge"]
        self.engine = self.app.create_engine()
        self.letters = DeadLetters(self.engine)
        self.letters.migrate()
        self.queue = Address(source).open(asynchronous=False)

    def send(self, *names: str) -> None:
        self.queue.dispatch_transactions(
            [Transaction(payload={"customer": name[0], "name": name}) for name in names]
        )

    def run(self) -> None:
        """Do what can be done now."""
        if not self.asynchronous:
            with open_task(self.app, self.consumer) as task:
                task.consume_transactions(self.consumer.policy)
            return

        async def consume() -> None:
            async with open_task_async(self.app, self.consumer) as task:
                await task.consume_transactions(self.consumer.policy)

        asyncio.run(consume())

    def run_until(self, *names: str) -> None:
        def goes_on() -> bool:
            self.run()
            return set(names) <= set(self.done)

        until(goes_on)

    def redrive(self, letter_id: int) -> None:
        self.letters.redrive(Filter(consumer="billing", ids=(letter_id,)), rca=FIXED, operator="me")

    def close(self) -> None:
        self.queue.close()
        self.engine.dispose()


@pytest.fixture(
    params=[
        "sqlite-threads",
        "postgresql-asyncio",
        "redis-threads",
        pytest.param("redis-asyncio", marks=pytest.mark.long),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, bool]]:
    with ExitStack() as opened:
        if request.param == "sqlite-threads":
            yield f"sqlite:///{tmp_path}/shop.db", f"sqlite:///{tmp_path}/orders.db", False
            return
        if request.param.startswith("redis"):
            source = f"{request.getfixturevalue('redis_url')}/{uuid4().hex}"
            yield f"sqlite:///{tmp_path}/shop.db", source, request.param == "redis-asyncio"
            return
        schema = opened.enter_context(new_schema(request.getfixturevalue("postgres_url")))
        yield schema.plain_url, f"{schema.plain_url}&queue=orders", True


@pytest.fixture
def shops(place: tuple[str, str, bool]) -> Iterator[Any]:
    opened: list[Shop] = []

    def open_(**order: Any) -> Shop:
        database, source, asynchronous = place
        opened.append(Shop(database, source, asynchronous=asynchronous, **order))
        return opened[-1]

    yield open_
    for each in opened:
        each.close()


@pytest.mark.req("OR-03", "OR-04")
def test_a_dead_event_holds_its_key_and_a_redrive_releases_it_in_order(shops: Any) -> None:
    shop = shops()
    shop.refuses = {"a1"}
    shop.send("a1", "a2", "b1", "a3", "b2")
    shop.run()
    assert shop.done == ["b1", "b2"]
    [letter] = shop.letters.find()
    assert letter.order_key == "a"
    shop.run()
    assert shop.done == ["b1", "b2"]
    shop.refuses.clear()
    shop.redrive(letter.id)
    shop.run_until("a3")
    assert shop.done == ["b1", "b2", "a1", "a2", "a3"]


@pytest.mark.req("OR-04")
def test_a_discarded_letter_releases_its_key(shops: Any) -> None:
    shop = shops()
    shop.refuses = {"a1"}
    shop.send("a1", "a2")
    shop.run()
    assert shop.done == []
    shop.letters.discard(Filter(consumer="billing"), reason="never mind", operator="me")
    shop.run_until("a2")
    assert shop.done == ["a2"]


@pytest.mark.req("OR-04")
def test_a_redriven_letter_that_dies_again_holds_its_key_again(shops: Any) -> None:
    shop = shops()
    shop.refuses = {"a1"}
    shop.send("a1", "a2")
    shop.run()
    [letter] = shop.letters.find()
    shop.redrive(letter.id)

    def died_again() -> bool:
        shop.run()
        [found] = shop.letters.find()
        return found.deaths == 2

    until(died_again)
    shop.run()
    assert shop.done == []


@pytest.mark.req("OR-03")
def test_a_dead_event_holds_nothing_with_continue(shops: Any) -> None:
    shop = shops(on_dead="continue")
    shop.refuses = {"a1"}
    shop.send("a1", "a2")
    shop.run()
    assert shop.done == ["a2"]
    [letter] = shop.letters.find()
    assert letter.order_key is None


@pytest.mark.req("OR-05")
def test_a_consumer_waits_when_too_many_keys_are_held(shops: Any, caplog: pytest.LogCaptureFixture) -> None:
    shop = shops(most_held=2)
    shop.refuses = {"a1", "b1"}
    shop.send("a1", "b1", "a2")
    shop.run()
    shop.send("c1")
    shop.run()
    assert shop.done == []
    assert "dead letters hold 2 of its keys, and most_held is 2" in caplog.text
    shop.refuses.clear()
    [letter] = [each for each in shop.letters.find() if each.order_key == "a"]
    shop.redrive(letter.id)
    shop.run_until("a1", "a2")
    shop.send("d1")
    shop.run_until("d1")


@pytest.mark.req("OR-06")
def test_an_event_without_its_key_is_refused(shops: Any) -> None:
    shop = shops()
    shop.queue.dispatch_transactions(
        [Transaction(payload={"name": "x"}), Transaction(payload={"customer": [1], "name": "y"})]
    )
    shop.send("a1")
    shop.run()
    assert shop.done == ["a1"]
    assert [(each.category, each.order_key) for each in shop.letters.find()] == [("contract", None)] * 2
    assert "customer is not a text, a whole number or a UUID" in shop.letters.find()[0].error


@pytest.mark.req("OR-06")
def test_an_event_whose_key_cannot_be_written_is_refused(shops: Any) -> None:
    """Python refuses to write a number of 5,000 digits. The others go on."""
    shop = shops(order_by=lambda order: int(order["name"][1:], 16))
    shop.send("a1", f"a{'f' * 5000}", "a2")
    shop.run()
    assert sorted(shop.done) == ["a1", "a2"]
    [letter] = shop.letters.find()
    assert (letter.category, letter.order_key) == ("contract", None)
    assert "<lambda> cannot be written as text" in letter.error


@pytest.mark.req("OR-05")
def test_commands_show_what_waits_behind_a_letter(
    place: tuple[str, str, bool], shops: Any, tmp_path: Path
) -> None:
    shop = shops()
    shop.refuses = {"a1"}
    shop.send("a1", "a2", "a3", "b1")
    shop.run()

    def noted() -> bool:
        shop.run()
        return bool(shop.letters.find()[0].waiting)

    until(noted)
    env = {**os.environ, "ONCEWARD_DATABASE": shop.database}
    listed = onceward("dlq", "list", cwd=tmp_path, env=env)
    assert "2 wait behind it" in listed.stdout.replace("\n", " ")
    shown = json.loads(onceward("dlq", "show", "1", "--json", cwd=tmp_path, env=env).stdout)
    assert (shown["order_key"], shown["waiting"], len(shown["waiting_ids"])) == ("a", 2, 2)


def test_a_function_gives_the_key(shops: Any) -> None:
    shop = shops(order_by=lambda payload: payload["name"][0])
    shop.send("a1", "a2", "b1")
    shop.run_until("a2", "b1")
    assert shop.done.index("a1") < shop.done.index("a2")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"order_by": ""}, "is not the name of a field"),
    ({"order_by": "customer id"}, "is not the name of a field"),
    ({"order_by": 7}, "must be the name of a field or a function"),
    ({"order_by": lambda: None}, "gets one argument, the payload"),
    ({"order_by": asyncio.sleep}, "plain function"),
    ({"order_by": "customer", "contract": None}, "no contract"),
    ({"order_by": "customer", "on_dead": "skip"}, "'hold' .* or 'continue'"),
    ({"order_by": "customer", "most_held": 0}, "1 or more, not 0"),
    ({"order_by": "customer", "most_held": True}, "1 or more, not True"),
    ({"on_dead": "continue"}, "no order_by"),
    ({"order_by": "customer", "source": "nats://localhost:4222/orders?consumer=x"}, "cannot keep order"),
]


@pytest.mark.req("OR-06")
@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_what_cannot_be_is_refused_with_the_remedy(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    source = given.get("source", f"sqlite:///{tmp_path}/orders.db")
    more = {"contract": CONTRACT, **{name: value for name, value in given.items() if name != "source"}}
    with pytest.raises(ConfigurationError, match=says):

        @app.consumer(source, **more)
        def charge(order: dict[str, Any], session: Any) -> None: ...


class Order(msgspec.Struct, rename="camel"):
    customer_id: str
    name: str


@pytest.mark.req("OR-06")
def test_a_field_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    with pytest.raises(ConfigurationError, match=r"but Order has no such field; it has customer_id, name"):

        @app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=CONTRACT, order_by="customer")
        def charge(order: Order, session: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=r"but its payload is int, which has no fields"):

        @app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=CONTRACT, order_by="customer")
        def count(number: int, session: Any) -> None: ...

    def lazy(payload: Any) -> Any:
        yield "a"

    with pytest.raises(
        ConfigurationError, match="must be a plain function, not `async def`, and have no `yield`"
    ):

        @app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=CONTRACT, order_by=lazy)
        def bill(order: Order, session: Any) -> None: ...


@pytest.mark.req("OR-01")
def test_a_field_has_the_name_of_the_model_or_that_of_the_payload(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    done: list[str] = []

    @app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=CONTRACT, order_by="customer_id")
    def charge(order: Order, session: Any) -> None:
        done.append(order.name)

    charge.send(Order(customer_id="a", name="a1"))
    with open_task(app, app.consumers["charge"]) as task:
        task.consume_transactions()
    rule = app.consumers["charge"].order
    assert done == ["a1"]
    assert rule.key_of(Transaction(payload={"customerId": "b"})) == "b"


@pytest.mark.req("OR-06")
def test_numbers_of_the_producer_and_order_by_exclude_each_other(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    numbered = Contract(
        consumer_id="billing",
        event_types=["*"],
        owner_team="tests",
        idempotency_mechanism="x",
        sequencing="strict",
    )
    with pytest.raises(ConfigurationError, match="leave one of the two out"):

        @app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=numbered, order_by="customer")
        def charge(order: dict[str, Any], session: Any) -> None: ...


@pytest.mark.req("OR-05")
def test_explain_says_how_order_is_kept(shops: Any) -> None:
    shop = shops()
    said = dict(conduct_of(shop.app, shop.consumer))
    assert said["order"] == (
        "by customer, one event of each at a time, as they arrive; a dead one holds those behind it, up to 1,000 keys"
    )
