"""Decorated functions stay functions, and mistakes are reported at once."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

from onceward import Onceward, Transaction
from onceward.app.app import Consumer, consumers_of
from onceward.app.build import as_task, database_url, in_an_app, open_task, task_class
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.inbox import Contract
from onceward.task.exceptions import InputException
from onceward.task.mixins.policies import ConsumerPolicy


class Order(msgspec.Struct):
    total: int


class Line(pydantic.BaseModel):
    total: int


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Onceward:
    """Ignore the settings of this project."""
    monkeypatch.chdir(tmp_path)
    return Onceward("shop")


def contract(**changes: Any) -> Contract:
    fields = {
        "consumer_id": "charge",
        "event_types": ["*"],
        "owner_team": "shop",
        "idempotency_mechanism": "row and record in one transaction",
    }
    return Contract(**{**fields, **changes})


# ── consumers ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_app_lives_as_long_as_one_of_its_consumers(app: Onceward) -> None:
    def in_another_app() -> Consumer:
        other = Onceward("other")
        other.consumer("memory://orders")(charge)
        return other.consumers.charge

    def charge(order: dict[str, int]) -> None: ...

    consumer = in_another_app()
    gc.collect()
    found = in_an_app(consumer)
    assert found is not None
    assert found[1] is consumer


def test_a_decorated_function_is_the_function_that_it_was(app: Onceward) -> None:
    def charge(order: Order) -> int:
        return order.total

    assert app.consumer("memory://orders")(charge) is charge
    assert charge(Order(3)) == 3
    assert app.consumers["charge"].function is charge
    assert app.consumers.charge is app.consumers["charge"]


def test_async_def_runs_in_asyncio_and_can_be_awaited_as_before(app: Onceward) -> None:
    @app.consumer("memory://orders")
    async def charge(order: Order) -> int:
        return order.total

    assert app.consumers.charge.asynchronous
    assert asyncio.run(charge(Order(3))) == 3


def test_a_consumer_may_have_another_name_than_its_function(app: Onceward) -> None:
    @app.consumer("memory://orders", name="charge-again")
    def charge(order: Order) -> None: ...

    assert list(app.consumers) == ["charge-again"]
    assert task_class(app.consumers["charge-again"]).__name__ == "charge-again"


def test_two_consumers_of_one_name_are_refused(app: Onceward) -> None:
    @app.consumer("memory://orders")
    def charge(order: Order) -> None: ...

    with pytest.raises(
        ConfigurationError, match="shop has two consumers 'charge'; rename one of them with name="
    ):
        app.consumer("memory://others")(charge)


def test_two_functions_with_one_consumer_id_are_refused_and_two_sources_of_one_function_are_not() -> None:
    app = Onceward("shop", database="sqlite:///shop.db")

    def charge(order: Order, session: Any) -> None: ...

    app.consumer("memory://orders", contract=contract())(charge)
    app.consumer("memory://late-orders", contract=contract(), name="charge-late")(charge)

    with pytest.raises(ConfigurationError, match="charge and ship have contracts with the same consumer_id"):

        @app.consumer("memory://parcels", contract=contract())
        def ship(order: Order, session: Any) -> None: ...


def test_what_is_no_source_or_sink_is_refused_with_the_name_of_the_function(app: Onceward) -> None:
    with pytest.raises(ConfigurationError, match=r"^charge: 'sqllite:///orders\.db' is not a source"):

        @app.consumer("sqllite:///orders.db")
        def charge(order: Order) -> None: ...

    with pytest.raises(ConfigurationError, match=r"^place: 'sqllite:///orders\.db' is not a sink"):

        @app.producer("sqllite:///orders.db")
        def place() -> None: ...


def yielding(order: Order) -> Iterator[int]:
    yield order.total


async def yielding_async(order: Order) -> AsyncIterator[int]:
    yield order.total


@pytest.mark.parametrize("function", [yielding, yielding_async])
def test_a_function_that_yields_is_no_consumer(app: Onceward, function: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"yields, so it is a producer.*@app\.producer"):
        app.consumer("memory://orders")(function)


@pytest.mark.parametrize(
    "thing", [Order, functools.partial(yielding), "charge"], ids=["class", "partial", "text"]
)
def test_only_functions_are_decorated(app: Onceward, thing: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"only a function \(`def` or `async def`\) can be decorated"
    ):
        app.consumer("memory://orders", name="charge")(thing)


def test_a_lambda_needs_a_name(app: Onceward) -> None:
    with pytest.raises(ConfigurationError, match=r"'<lambda>' is not a valid consumer name.*name='charge'"):
        app.consumer("memory://orders")(lambda order: None)


def test_a_contract_needs_a_database(app: Onceward) -> None:
    def charge(order: Order, session: Any) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"needs a database: write Onceward\('shop', database=.*ONCEWARD_DATABASE"
    ):
        app.consumer("memory://orders", contract=contract())(charge)
    assert not app.consumers


def test_the_annotation_is_the_model_of_the_contract() -> None:
    app = Onceward("shop", database="sqlite:///shop.db")

    @app.consumer("memory://orders", contract=contract())
    def charge(order: Order, session: Any) -> None: ...

    @app.consumer("memory://counts", contract=contract(consumer_id="counting"))
    def count(orders: list[int], session: Any) -> None: ...

    found = app.consumers.charge.contract
    assert found is not None
    assert found.model is Order
    assert app.consumers["count"].contract == contract(consumer_id="counting")


def test_a_contract_with_another_model_than_the_annotation_is_refused() -> None:
    app = Onceward("shop", database="sqlite:///shop.db")

    def charge(order: Order, session: Any) -> None: ...

    with pytest.raises(
        ConfigurationError, match="charge converts payloads to Line, but the function takes Order"
    ):
        app.consumer("memory://orders", contract=contract(model=Line))(charge)


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_deployment_changes_source_and_policy_of_a_consumer(
    app: Onceward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEWARD_CONSUMERS__CHARGE__SOURCE", "memory://elsewhere")
    monkeypatch.setenv("ONCEWARD_CONSUMERS__CHARGE__POLICY__LOOP__LIMIT", "3")
    changed = Onceward("shop", concurrency=4)

    @changed.consumer("memory://orders", policy={"loop": {"limit": 9, "batch": {"size": 7}}})
    def charge(order: Order) -> None: ...

    consumer = changed.consumers.charge
    assert str(consumer.source) == "memory://elsewhere"
    loop = consumer.policy.loop
    assert (loop.limit, loop.batch.size, loop.concurrency.value) == (3, 7, 4)


@pytest.mark.parametrize("policy", [{"loop": {"limt": 3}}, {"loop": {"limit": "many"}}, [1]])
def test_a_wrong_policy_is_refused_with_the_name_of_the_consumer(app: Onceward, policy: Any) -> None:
    def charge(order: Order) -> None: ...

    with pytest.raises(ConfigurationError, match="the policy of charge: "):
        app.consumer("memory://orders", policy=policy)(charge)


def test_a_mistyped_field_of_a_policy_is_reported_with_those_that_there_are_and_where_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONCEWARD_CONSUMERS__CHARGE__POLICY__STEPS__PROCES__RETRY__TIMEOUT", "3")
    app = Onceward("shop")

    def charge(order: Order) -> None: ...

    output = "^ONCEWARD_CONSUMERS__CHARGE__POLICY__.*: the policy of charge: steps.proces: no such field"
    with pytest.raises(ConfigurationError, match=f"{output}; the fields are .*process"):
        app.consumer("memory://orders")(charge)


def test_a_policy_may_be_a_policy(app: Onceward) -> None:
    given = ConsumerPolicy.model_validate({"loop": {"limit": 2}})

    @app.consumer("memory://orders", policy=given)
    def charge(order: Order) -> None: ...

    loop = app.consumers.charge.policy.loop
    assert (loop.limit, loop.batch.size) == (2, 100), "the rest are the defaults of an app"


def test_nothing_runs_with_settings_of_a_consumer_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEWARD_CONSUMERS__CHRAGE__SOURCE", "memory://elsewhere")
    app = Onceward("shop")

    @app.consumer("memory://orders")
    def charge(order: Order) -> None: ...

    with (
        pytest.raises(ConfigurationError, match="no consumer is named 'chrage'"),
        open_task(app, app.consumers.charge),
    ):
        pass


# ── producers ───────────────────────────────────────────────────────────────────────────────────────────


def sent(url: str) -> list[Any]:
    with Address(url).open(asynchronous=False) as connector:
        return [each.payload for each in connector.fetch_transactions(100)]


def test_what_a_producer_returns_or_yields_is_sent_as_plain_data(app: Onceward, tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"

    @app.producer(url)
    def one(total: int) -> Order:
        return Order(total)

    @app.producer(url)
    def many(*totals: int) -> Iterator[Any]:
        for total in totals:
            yield Line(total=total)
        yield {"lines": [Line(total=0)]}
        yield Transaction(payload="as it is")

    @app.producer(url)
    def none() -> None: ...

    @app.producer(url)
    async def later(total: int) -> Line:
        return Line(total=total)

    @app.producer(url)
    async def many_later(*totals: int) -> AsyncIterator[Order]:
        for total in totals:
            yield Order(total)

    assert app.produce(one, 1).succeeded == 1
    assert app.produce(many, 2, 3).succeeded == 4
    assert app.produce(none).succeeded == 0
    assert asyncio.run(app.produce_async(later, 4)).succeeded == 1
    assert asyncio.run(app.produce_async(many_later, 5, 6)).succeeded == 2
    assert sent(url) == [
        {"total": 1},
        {"total": 2},
        {"total": 3},
        {"lines": [{"total": 0}]},
        "as it is",
        {"total": 4},
        {"total": 5},
        {"total": 6},
    ]
    assert one(7) == Order(7)


class Shop:
    """A producer as a method, in all the ways there are to write one."""

    def __init__(self, total: int) -> None:
        self.total = total

    def place(self, more: int) -> Iterator[int]:
        yield self.total + more

    async def place_later(self, more: int) -> int:
        return self.total + more


def test_a_bound_method_is_a_producer(app: Onceward, tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    shop = Shop(3)
    app.producer(url)(shop.place)
    app.producer(url)(shop.place_later)
    assert app.produce(shop.place, 1).succeeded == 1
    assert asyncio.run(app.produce_async(shop.place_later, 2)).succeeded == 1
    assert sent(url) == [4, 5]
    with pytest.raises(ConfigurationError, match="is not a producer"):
        app.produce(Shop(4).place, 1)


def test_a_producer_declared_in_a_class_is_called_on_its_objects(app: Onceward, tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"

    class Till:
        total = 3

        @app.producer(url)
        def place(self, more: int) -> int:
            return self.total + more

        @app.producer(url)
        @classmethod
        def place_all(cls, more: int) -> Iterator[int]:
            yield cls.total * more

        @app.producer(url)
        @staticmethod
        def place_one(total: int) -> int:
            return total

    assert app.produce(Till().place, 1).succeeded == 1
    assert app.produce(Till.place, Till(), 2).succeeded == 1
    assert app.produce(Till.place_all, 2).succeeded == 1
    assert app.produce(Till().place_one, 7).succeeded == 1
    assert sent(url) == [4, 5, 6, 7]


def test_a_bound_method_is_a_consumer_and_leads_to_its_app(app: Onceward) -> None:
    class Till:
        def charge(self, order: Order) -> None: ...

    till = Till()
    app.consumer("memory://orders")(till.charge)
    app.producer(till.charge)(yielding)
    assert consumers_of(till.charge) == [(app, app.consumers["charge"])]
    assert consumers_of(Till().charge) == []


def test_a_static_method_is_decorated_inside_and_not_outside(app: Onceward) -> None:
    def charge(order: Order) -> None: ...

    with pytest.raises(ConfigurationError, match=r"only a function .* not staticmethod"):
        app.consumer("memory://orders")(staticmethod(charge))


async def unawaited(*_: Any) -> None: ...


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("make", [unawaited, yielding_async])
def test_a_producer_that_returns_before_it_has_run_is_an_error(app: Onceward, make: Any) -> None:
    @app.producer("memory://orders")
    def place() -> Any:
        return make(1)

    @app.producer("memory://orders")
    def place_each() -> Any:
        yield make(1)

    @app.producer("memory://orders")
    async def place_later() -> Any:
        return make(1)

    for call in (
        lambda: app.produce(place),
        lambda: app.produce(place_each),
        lambda: asyncio.run(app.produce_async(place_later)),
    ):
        with pytest.raises((TypeError, InputException), match="so its code has not run"):
            call()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_consumer_that_returns_a_coroutine_fails_its_messages(app: Onceward, tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"

    @app.consumer(url)
    def charge(order: int) -> Any:
        return unawaited(order)

    with open_task(app, app.consumers["charge"]) as task:
        outcome = task.start_processing(Transaction(payload=1))
    assert "charge returned a coroutine, so its code has not run" in str(outcome.error)


def test_what_cannot_be_sent_is_said(app: Onceward, tmp_path: Path) -> None:
    @app.producer(f"memory://{tmp_path}")
    def strange() -> object:
        return object()

    with pytest.raises(Exception, match="object cannot be sent; a payload must be plain data"):
        app.produce(strange)


def test_models_anywhere_in_a_dict_are_sent_as_plain_data_and_what_is_no_model_is_said(
    app: Onceward, tmp_path: Path
) -> None:
    sent: list[Any] = []

    @app.consumer(f"memory://{tmp_path}")
    def charge(order: dict[str, Any]) -> None:
        sent.append(order)

    charge.send({"plain": 1})
    charge.send({"items": [Line(total=2)]})
    with pytest.raises(TypeError, match="object cannot be sent; a payload must be plain data"):
        charge.send({"items": [object()]})
    with open_task(app, app.consumers["charge"]) as task:
        task.consume_transactions(app.consumers["charge"].policy)
    assert sent == [{"plain": 1}, {"items": [{"total": 2}]}]


def test_a_producer_goes_to_the_method_of_its_kind_and_to_its_own_app(app: Onceward) -> None:
    @app.producer("memory://orders")
    def place() -> int:
        return 1

    @app.producer("memory://orders")
    async def place_later() -> int:
        return 1

    with pytest.raises(
        ConfigurationError, match=r"place_later is async: use `await app\.produce_async\(place_later"
    ):
        app.produce(place_later)
    with pytest.raises(ConfigurationError, match=r"place is not async: use `app\.produce\(place, …\)`$"):
        asyncio.run(app.produce_async(place))
    with pytest.raises(ConfigurationError, match="is not a producer of other"):
        Onceward("other").produce(place)
    with pytest.raises(ConfigurationError, match="two producers 'place'"):
        app.producer("memory://orders")(place)


def test_a_sink_is_a_url_or_a_consumer_above_it(app: Onceward) -> None:
    @app.consumer("redis://localhost/orders?group=charge")
    def charge(order: Order) -> None: ...

    @app.producer(charge)
    def place() -> int:
        return 3

    assert app.producers["place"].sink.url == "redis://localhost/orders?group=charge"
    for nothing in (place, print):
        with pytest.raises(
            ConfigurationError, match=rf"{nothing.__name__} is not a consumer of shop: a producer needs"
        ):
            app.producer(nothing)
    app.consumer("redis://localhost/orders?group=again", name="again")(charge)
    with pytest.raises(
        ConfigurationError, match=r"charge is 2 consumers of shop.*write @app.producer\('sqlite:"
    ):
        app.producer(charge)


def test_a_boundary_is_no_sink_without_its_zones(app: Onceward) -> None:
    @app.consumer("boundary+http://localhost:7700?consumer=billing")
    def charge(order: Order) -> None: ...

    with pytest.raises(ConfigurationError, match=r"add \?from_zone=HERE&to_zone=THERE"):
        app.producer(charge)(yielding)


def test_nothing_is_sent_with_settings_of_a_producer_that_there_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONCEWARD_PRODUCERS__PALCE__SINK", "memory://elsewhere")
    app = Onceward("shop")

    @app.producer("memory://orders")
    def place() -> int:
        return 3

    with pytest.raises(ConfigurationError, match="no producer is named 'palce'; known: place"):
        app.produce(place)
    with pytest.raises(ConfigurationError, match="no producer is named 'palce'; known: place"):
        app.check()


# ── other commands ──────────────────────────────────────────────────────────────────────────────────────


def test_a_function_leads_to_its_app_unless_it_is_in_two(app: Onceward) -> None:
    @app.consumer("memory://orders")
    def charge(order: Order) -> None:
        """Take the money."""

    consumer = app.consumers.charge
    assert in_an_app(charge) == in_an_app(consumer) == (app, consumer)
    assert as_task(charge).__doc__ == "Take the money."
    assert as_task(charge).__module__ == __name__
    assert as_task(print) is print
    app.consumer("memory://others", name="again")(charge)
    assert len(consumers_of(charge)) == 2
    with pytest.raises(ConfigurationError, match=r"MODULE:app\.consumers\.charge or app\.consumers\.again"):
        as_task(charge)
    assert as_task(app.consumers.again).__name__ == "again"


@pytest.mark.parametrize(
    ("url", "threads", "asyncio_"),
    [
        ("sqlite:///shop.db", "sqlite", "sqlite+aiosqlite"),
        ("sqlite+aiosqlite:///shop.db", "sqlite", "sqlite+aiosqlite"),
        ("postgres://h/x", "postgresql+psycopg", "postgresql+psycopg"),
        ("postgresql://h/x", "postgresql+psycopg", "postgresql+psycopg"),
    ],
)
def test_a_database_gets_the_driver_of_the_mode(url: str, threads: str, asyncio_: str) -> None:
    assert database_url(url, asynchronous=False).drivername == threads
    assert database_url(url, asynchronous=True).drivername == asyncio_


@pytest.mark.parametrize("url", ["postgresql://u:hunter2@h:port/x", "hunter2", "mysql://u:hunter2@h/x"])
def test_a_database_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="database") as refused:
        database_url(url, asynchronous=False)
    assert "hunter2" not in str(refused.value)


def test_an_app_gives_engines_on_its_database(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    engine = app.create_engine()
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE charges (cents INTEGER)")
    engine.dispose()

    async def tables() -> list[Any]:
        engine = app.create_async_engine()
        async with engine.connect() as connection:
            found = await connection.exec_driver_sql("SELECT name FROM sqlite_master")
        await engine.dispose()
        return list(found.scalars())

    assert asyncio.run(tables()) == ["charges"]


def test_an_app_without_a_database_has_no_engine_and_says_how_to_get_one(app: Onceward) -> None:
    for create in (app.create_engine, app.create_async_engine):
        with pytest.raises(ConfigurationError, match=r"shop has no database: .*ONCEWARD_DATABASE"):
            create()


def test_two_consumers_on_one_queue_are_refused() -> None:
    app = Onceward("shop")

    def charge(order: dict[str, Any]) -> None: ...

    def mail(order: dict[str, Any]) -> None: ...

    app.consumer("redis://localhost/orders?group=charge")(charge)
    with pytest.raises(
        ConfigurationError, match="charge and mail both consume from redis://localhost/orders"
    ):
        app.consumer("redis://localhost/orders?group=charge")(mail)
    app.consumer("redis://localhost/orders?group=mail")(mail)


def test_a_decorator_without_a_source_says_what_to_write() -> None:
    def charge(order: dict[str, Any]) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"write @app.consumer\('sqlite:///orders.db'\) above charge"
    ):
        Onceward("shop").consumer(charge)  # type: ignore[arg-type]


def test_a_misspelt_environment_does_not_open_the_gate() -> None:
    with pytest.raises(ConfigurationError, match=r"env: .*must be one of"):
        Onceward("shop", env="prodution")
    assert Onceward("shop", env="Production").settings.env == "Production"


def test_a_contract_that_is_none_is_refused_when_the_function_is_decorated() -> None:
    app = Onceward("shop", database="sqlite:///shop.db")
    with pytest.raises(
        ConfigurationError, match=r"handle: contract must be a Contract\(.*\) or None, not dict"
    ):

        @app.consumer("memory://orders", contract={"consumer_id": "billing"})  # type: ignore[arg-type]
        def handle(order: Order, session: Any) -> None: ...
