"""Mistakes are refused early, with a message that says what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from onceward import (
    AsyncConsumerTask,
    AsyncHybridTask,
    AsyncProducerTask,
    ConsumerTask,
    HybridTask,
    ProducerTask,
    Transaction,
)
from onceward.errors import ConfigurationError
from onceward.task.mixins.policies import (
    ConsumerPolicy,
    ConsumerSteps,
    FetchPolicy,
    ProducerPolicy,
)
from tests.support.world import ListSource, World, transactions


class SyncSource:
    def fetch_transactions(self, size: int) -> list[Transaction]:
        return []


class AsyncSource:
    async def fetch_transactions_async(self, size: int) -> list[Transaction]:
        return []


class Sink:
    def send(self, payload: Any) -> None: ...


class Consumer(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None: ...


class AsyncConsumer(AsyncConsumerTask):
    async def process_transaction(self, transaction: Transaction) -> None: ...


class Producer(ProducerTask):
    def produce_transaction(self, transaction: Transaction) -> None: ...


class AsyncProducer(AsyncProducerTask):
    async def produce_transaction(self, transaction: Transaction) -> None: ...


class Hybrid(HybridTask):
    def process_transaction(self, transaction: Transaction) -> None: ...
    def produce_transaction(self, transaction: Transaction) -> None: ...


class AsyncHybrid(AsyncHybridTask):
    async def process_transaction(self, transaction: Transaction) -> None: ...
    async def produce_transaction(self, transaction: Transaction) -> None: ...


CONSUMERS = [Consumer, AsyncConsumer, Hybrid, AsyncHybrid]
PRODUCERS = [Producer, AsyncProducer]
every_task = pytest.mark.parametrize("cls", CONSUMERS + PRODUCERS)
every_consumer = pytest.mark.parametrize("cls", CONSUMERS)


def source_for(cls: Any) -> Any:
    return AsyncSource() if cls.asynchronous else SyncSource()


# ── connectors ──────────────────────────────────────────────────────────────────────────────────────────


@every_task
def test_a_task_without_connectors_is_refused_and_reported_how_to_get_some(cls: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{cls.__name__} has no connectors.*connectors="):
        cls()


@pytest.mark.parametrize("cls", PRODUCERS)
def test_a_producer_may_say_that_it_needs_no_connector(cls: Any) -> None:
    assert cls(connectors={}).connectors == {}


@every_consumer
def test_a_consumer_with_nothing_to_fetch_from_is_refused(cls: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing to consume from.*none.*fetch_transactions"):
        cls(connectors={})


@every_consumer
def test_a_consumer_whose_connectors_cannot_fetch_is_refused_with_their_names(cls: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'mailer' \(Sink\).*fetch_transactions"):
        cls(connectors={"mailer": Sink()})


@every_consumer
def test_a_connector_that_does_not_fetch_may_stand_beside_one_that_does(cls: Any) -> None:
    task = cls(connectors={"source": source_for(cls), "mailer": Sink()})
    assert set(task.connectors) == {"source", "mailer"}


@pytest.mark.parametrize("cls", [AsyncConsumer, AsyncHybrid])
def test_an_asynchronous_consumer_given_a_synchronous_connector_is_notified(cls: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"asynchronous.*'orders'.*fetch_transactions_async"
    ) as raised:
        cls(connectors={"orders": SyncSource()})
    assert "ConsumerTask" in str(raised.value)


@pytest.mark.parametrize("cls", [Consumer, Hybrid])
def test_a_synchronous_consumer_given_an_asynchronous_connector_is_notified(cls: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"synchronous.*'orders'.*AsyncConsumerTask"):
        cls(connectors={"orders": AsyncSource()})


@every_task
@pytest.mark.parametrize("bad", [[SyncSource()], SyncSource(), "source", 7])
def test_connectors_that_are_no_dict_are_refused(cls: Any, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"connectors of .* must be a dict by name"):
        cls(connectors=bad)


@every_task
@pytest.mark.parametrize("bad", [["db"], "db", 7])
def test_services_that_are_no_dict_are_refused(cls: Any, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"services of .* must be a dict by name"):
        cls(connectors={"source": source_for(cls)}, services=bad)


@every_task
def test_connectors_and_services_are_injected_by_name(cls: Any) -> None:
    source, db = source_for(cls), object()
    task = cls(connectors={"source": source}, services={"db": db})
    assert task.connectors["source"] is source
    assert task.services["db"] is db


@every_task
def test_a_task_does_not_follow_the_dicts_it_was_given(cls: Any) -> None:
    connectors: dict[str, Any] = {"source": source_for(cls)}
    services: dict[str, Any] = {}
    task = cls(connectors=connectors, services=services)
    connectors.clear()
    services["db"] = object()
    assert (set(task.connectors), task.services) == ({"source"}, {})


@every_task
def test_settings_of_another_kind_are_refused(cls: Any) -> None:
    with pytest.raises(ConfigurationError, match="EngineSettings"):
        cls(connectors={"source": source_for(cls)}, settings={"stuck_grace": 1})


# ── handlers ────────────────────────────────────────────────────────────────────────────────────────────


async def coroutine(self: Any, *_: Any) -> None: ...


def plain(self: Any, *_: Any) -> None: ...


HANDLERS = [
    (ConsumerTask, AsyncConsumerTask, "process_transaction"),
    (ConsumerTask, AsyncConsumerTask, "handle_transaction_success"),
    (ConsumerTask, AsyncConsumerTask, "handle_transaction_exception"),
    (ProducerTask, AsyncProducerTask, "produce_transaction"),
    (ProducerTask, AsyncProducerTask, "handle_produce_success"),
    (ProducerTask, AsyncProducerTask, "handle_produce_exception"),
    (HybridTask, AsyncHybridTask, "process_transaction"),
    (HybridTask, AsyncHybridTask, "handle_transaction_exception"),
    (HybridTask, AsyncHybridTask, "produce_transaction"),
    (HybridTask, AsyncHybridTask, "handle_produce_success"),
]
REQUIRED = {"process_transaction", "produce_transaction"}


def defined(base: Any, handler: Callable[..., Any], **methods: Any) -> Any:
    needed = {name: handler for name in REQUIRED if hasattr(base, name)}
    return type("Orders", (base,), {**needed, **methods})


@pytest.mark.parametrize(("sync", "asynchronous", "name"), HANDLERS)
def test_an_async_def_handler_on_a_threaded_task_is_refused(sync: Any, asynchronous: Any, name: str) -> None:
    cls = defined(sync, plain, **{name: coroutine})
    with pytest.raises(ConfigurationError, match=rf"Orders\.{name} is `async def`.*Async"):
        cls(connectors={"source": SyncSource()})


@pytest.mark.parametrize(("sync", "asynchronous", "name"), HANDLERS)
def test_a_plain_def_handler_on_an_asynchronous_task_is_refused(
    sync: Any, asynchronous: Any, name: str
) -> None:
    cls = defined(asynchronous, coroutine, **{name: plain})
    with pytest.raises(ConfigurationError, match=rf"Orders\.{name} is a plain `def`.*make it `async def`"):
        cls(connectors={"source": AsyncSource()})


def test_a_decorated_handler_that_returns_an_awaitable_is_accepted() -> None:
    @functools.wraps(coroutine)
    def decorated(self: Any, *arguments: Any) -> Any:
        return coroutine(self, *arguments)

    world = World("asyncio")
    task = defined(AsyncProducerTask, coroutine, produce_transaction=decorated)(connectors={})
    assert world.produce(task, transactions(2)).succeeded == 2


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (ConsumerTask, "process_transaction"),
        (AsyncConsumerTask, "process_transaction"),
        (ProducerTask, "produce_transaction"),
        (AsyncProducerTask, "produce_transaction"),
    ],
)
def test_a_task_that_does_not_define_its_required_method_is_refused(base: Any, name: str) -> None:
    cls = type("Orders", (base,), {})
    with pytest.raises(ConfigurationError, match=rf"Orders.*{name}"):
        cls(connectors={"source": source_for(base)})


# ── policies and sources, at the call ───────────────────────────────────────────────────────────────────


def fetching_from(name: str | None) -> ConsumerPolicy:
    return ConsumerPolicy(steps=ConsumerSteps(fetch=FetchPolicy(connector_name=name)))


def consumer_of(world: World, **connectors: Any) -> Any:
    task = world.consumer()
    task.connectors = connectors
    return task


def test_an_unknown_connector_name_is_refused_with_the_names_there_are(world: World) -> None:
    task = consumer_of(world, orders=ListSource(), refunds=ListSource())
    with pytest.raises(ConfigurationError, match=r"no connector 'ordres'; it has 'orders', 'refunds'"):
        world.consume(task, fetching_from("ordres"))


def test_several_connectors_and_none_named_source_is_refused_with_what_to_do(world: World) -> None:
    task = consumer_of(world, orders=ListSource(), refunds=ListSource())
    with pytest.raises(ConfigurationError, match=r"'orders', 'refunds'.*connector_name.*'source'"):
        world.consume(task)


def test_a_named_connector_that_cannot_fetch_is_refused_with_what_to_do(world: World) -> None:
    task = consumer_of(world, source=ListSource(), mailer=Sink())
    with pytest.raises(ConfigurationError, match=r"'mailer'.*Sink.*fetch_transactions.*connector_name"):
        world.consume(task, fetching_from("mailer"))


def test_the_named_connector_is_the_one_that_is_fetched_from(world: World) -> None:
    orders, refunds = ListSource(transactions(2)), ListSource(transactions(3))
    assert (
        world.consume(consumer_of(world, orders=orders, refunds=refunds), fetching_from("refunds")).succeeded
        == 3
    )
    assert orders.asked == []


def test_of_several_connectors_the_one_named_source_is_fetched_from(world: World) -> None:
    task = consumer_of(world, other=ListSource(transactions(1)), source=ListSource(transactions(2)))
    assert world.consume(task).succeeded == 2


def test_the_only_connector_is_the_source_whatever_its_name(world: World) -> None:
    assert world.consume(consumer_of(world, orders=ListSource(transactions(2)))).succeeded == 2


@pytest.mark.parametrize("bad", [ConsumerPolicy(), {}, {"loop": {"limit": 1}}, 7, ProducerPolicy])
def test_a_producer_given_another_policy_is_reported_which_it_takes(world: World, bad: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"produce_transactions.*takes a ProducerPolicy.*model_validate"
    ):
        world.produce(world.producer(), [], bad)


@pytest.mark.parametrize("bad", [ProducerPolicy(), {}, {"loop": {"limit": 1}}, 7, ConsumerPolicy])
def test_a_consumer_given_another_policy_is_reported_which_it_takes(world: World, bad: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"consume_transactions.*takes a ConsumerPolicy.*model_validate"
    ):
        world.consume(world.consumer(), bad)


def test_a_task_that_overrides_its_constructor_and_forgets_its_base_still_produces(world: World) -> None:
    base = type(world.producer())

    class Forgetful(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.prefix = "x"

    assert world.produce(Forgetful(), transactions(2)).succeeded == 2
