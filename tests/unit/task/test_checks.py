"""Mistakes in a task class that would otherwise show with its first message, or never."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import Mock

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
from onceward.middleware import Middleware, StepCall, StepInfo
from tests.support.inbox.contracts import contract
from tests.support.world import ListSource, World, transactions


def plain(self: Any, *_: Any) -> None: ...
async def coroutine(self: Any, *_: Any) -> None: ...


def task_of(world: World, base: Any, **members: Any) -> Any:
    handler = coroutine if world.asynchronous else plain
    required = dict.fromkeys(("process_transaction", "produce_transaction"), handler)
    return type("Orders", (base,), required | members)


def consumer_base(world: World) -> Any:
    return AsyncConsumerTask if world.asynchronous else ConsumerTask


def producer_base(world: World) -> Any:
    return AsyncProducerTask if world.asynchronous else ProducerTask


def hybrid_base(world: World) -> Any:
    return AsyncHybridTask if world.asynchronous else HybridTask


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────

MISSPELLED = [
    (consumer_base, "handle_transaction_sucess", "handle_transaction_success"),
    (consumer_base, "handle_transaction_succes", "handle_transaction_success"),
    (consumer_base, "handle_transactions_success", "handle_transaction_success"),
    (consumer_base, "handleTransactionSuccess", "handle_transaction_success"),
    (consumer_base, "handle_transaction_success_async", "handle_transaction_success"),
    (consumer_base, "hande_transaction_exception", "handle_transaction_exception"),
    (consumer_base, "handle_transaction_exeption", "handle_transaction_exception"),
    (producer_base, "handle_produce_sucess", "handle_produce_success"),
    (producer_base, "handle_produce_exceptoin", "handle_produce_exception"),
    (hybrid_base, "handle_produce_sucess", "handle_produce_success"),
    (hybrid_base, "handle_transaction_sucess", "handle_transaction_success"),
]


@pytest.mark.parametrize(("base", "name", "meant"), MISSPELLED)
def test_a_misspelled_handler_is_refused_with_the_name_that_is_meant(
    world: World, base: Any, name: str, meant: str
) -> None:
    handler = coroutine if world.asynchronous else plain
    with pytest.raises(ConfigurationError, match=rf"Orders\.{name} is never called; did you mean {meant}\?"):
        task_of(world, base(world), **{name: handler})(connectors={"source": ListSource()})


@pytest.mark.parametrize(
    ("base", "name", "meant"),
    [
        (consumer_base, "proccess_transaction", "process_transaction"),
        (producer_base, "produce_transation", "produce_transaction"),
    ],
)
def test_a_misspelled_main_method_is_found_too(world: World, base: Any, name: str, meant: str) -> None:
    cls = type("Orders", (base(world),), {name: plain})
    with pytest.raises(ConfigurationError, match=rf"did you mean {meant}\?"):
        cls(connectors={"source": ListSource()})


def test_a_misspelled_override_of_an_inherited_handler_is_refused(world: World) -> None:
    handler = coroutine if world.asynchronous else plain
    base = task_of(world, consumer_base(world), handle_transaction_success=handler)
    cls = type("Sub", (base,), {"handle_transaction_sucess": handler})
    with pytest.raises(
        ConfigurationError, match=r"Sub\.handle_transaction_sucess is never called; did you mean"
    ):
        cls(connectors={"source": ListSource()})


def test_a_helper_named_after_an_inherited_main_method_and_an_override_are_left_alone(world: World) -> None:
    base = task_of(world, hybrid_base(world))
    cls = type("Sub", (base,), {"process_transactions": plain, "produce_transactions": plain})
    assert cls(connectors={"source": ListSource()})


OWN = [
    "handle_refund", "handle_transaction", "handle_success", "handle_error", "handle_exception", "process_order",
    "process_transactions", "reprocess_transaction", "process_transaction_v2", "process_transaction_async",
    "handle_transaction_success_email", "handle_transaction_refund", "handle_produce", "produce_report",
    "_handle_transaction_sucess", "_process_transaction", "on_success", "retry_transaction",
]  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_method_of_the_users_own_is_left_alone(world: World, name: str) -> None:
    cls = task_of(world, hybrid_base(world), **{name: plain})
    assert getattr(cls(connectors={"source": ListSource()}), name)


def test_a_helper_beside_the_handler_it_is_named_after_is_left_alone(world: World) -> None:
    handler = coroutine if world.asynchronous else plain
    members = {"handle_transaction_success": handler, "handle_transaction_successs": plain}
    assert task_of(world, consumer_base(world), **members)(connectors={"source": ListSource()})


# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────


def no_parameter(self: Any) -> None: ...
def one(self: Any, transaction: Transaction) -> None: ...
def two(self: Any, transaction: Transaction, result: Any) -> None: ...
def three(self: Any, transaction: Transaction, result: Any, more: Any) -> None: ...
def by_name(self: Any, *, transaction: Transaction) -> None: ...


@functools.wraps(two)
def narrower(self: Any, transaction: Transaction) -> None: ...


def in_mode(world: World, function: Any) -> Any:
    if not world.asynchronous:
        return function
    parameters = ", ".join(function.__code__.co_varnames)
    star = "*, " if function is by_name else ""
    scope: dict[str, Any] = {}
    exec(f"async def made({parameters.replace('transaction', star + 'transaction', 1)}): ...", scope)
    return scope["made"]


WRONG = [
    ("process_transaction", no_parameter, "self, transaction"),
    ("process_transaction", two, "self, transaction"),
    ("process_transaction", by_name, "self, transaction"),
    ("handle_transaction_success", one, "self, transaction, result"),
    ("handle_transaction_success", three, "self, transaction, result"),
    ("handle_transaction_success", narrower, "self, transaction, result"),
    ("handle_transaction_exception", one, "self, transaction, exc"),
    ("produce_transaction", two, "self, transaction"),
    ("handle_produce_success", one, "self, transaction, result"),
    ("handle_produce_exception", one, "self, transaction, exc"),
]


@pytest.mark.parametrize(("name", "handler", "parameters"), WRONG)
def test_a_handler_with_other_parameters_is_refused(
    world: World, name: str, handler: Any, parameters: str
) -> None:
    cls = task_of(world, hybrid_base(world), **{name: in_mode(world, handler)})
    with pytest.raises(ConfigurationError, match=rf"Orders\.{name} must take \({parameters}\): "):
        cls(connectors={"source": ListSource()})


def test_a_contract_brings_a_session_and_nothing_else_does(world: World) -> None:
    for members, problem in (
        (
            {"contract": contract(), "process_transaction": in_mode(world, one)},
            r"\(self, transaction, session\)",
        ),
        ({"process_transaction": in_mode(world, two)}, r"\(self, transaction\).*`session` needs a contract"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            task_of(world, consumer_base(world), **members)(connectors={"source": ListSource()})


def test_defaults_stars_and_mocks_are_accepted(world: World) -> None:
    def optional(
        self: Any, transaction: Transaction, result: Any = None, *more: Any, **named: Any
    ) -> None: ...

    for handler in (plain, optional):
        members = dict.fromkeys(("process_transaction", "handle_transaction_success"), handler)
        type("Orders", (ConsumerTask,), members)(connectors={"source": ListSource()})
    type("Orders", (ConsumerTask,), {"process_transaction": Mock()})(connectors={"source": ListSource()})


def test_a_middleware_may_pass_more_arguments(world: World) -> None:
    class Tenant(Middleware):
        def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
            async def with_tenant(transaction: Transaction, *more: Any) -> Any:
                return await call(transaction, *more, "tenant")

            return with_tenant if step.name == "process" else call

    members = {"middleware": [Tenant()], "process_transaction": in_mode(world, two)}
    task = task_of(world, consumer_base(world), **members)(connectors={"source": ListSource(transactions(1))})
    assert world.consume(task).succeeded == 1


# ── constructors ────────────────────────────────────────────────────────────────────────────────────────


def forgetful(world: World, base: Any, **members: Any) -> Any:
    def __init__(self: Any, prefix: str) -> None:
        self.prefix = prefix

    return task_of(world, base(world), __init__=__init__, **members)("x")


def test_a_consumer_whose_constructor_forgets_its_base_is_notified(world: World) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Orders has no connectors: its __init__ must call super\(\)"
    ):
        world.consume(forgetful(world, consumer_base))


def test_a_producer_whose_constructor_forgets_its_base_is_reported_so_when_it_needs_a_connector(
    world: World,
) -> None:
    def produce(_: Transaction) -> None:
        task.connectors["sink"].send()

    task = forgetful(world, producer_base, produce_transaction=world.handler(produce))
    outcome = world.run(task.start_producing, Transaction(payload=1))
    assert "Orders has no connectors: its __init__ must call super().__init__" in str(outcome.error)


def test_a_task_whose_constructor_forgets_its_base_is_checked_when_it_is_called(world: World) -> None:
    task = forgetful(world, producer_base, handle_produce_sucess=plain)
    with pytest.raises(ConfigurationError, match="did you mean handle_produce_success"):
        world.produce(task, transactions(1))


def test_connectors_may_be_set_without_the_base_constructor(world: World) -> None:
    task = forgetful(world, consumer_base)
    task.connectors, task.services = {"source": ListSource(transactions(2))}, {}
    assert world.consume(task).succeeded == 2
