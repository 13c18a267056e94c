"""From a task and a policy to what the engine runs; and the checks that say early what cannot work."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Iterable
from functools import partial
from typing import Any, Protocol

import msgspec

from onceward.errors import ConfigurationError
from onceward.task.base import BaseTask
from onceward.task.call import REQUIRED, Wiring
from onceward.task.exceptions import ConsumerLoopTimeoutException, LoopError, ProducerLoopTimeoutException
from onceward.task.lifecycle import Step
from onceward.task.loops import AsyncBatches, Batches, consume, produce
from onceward.task.mixins.policies import ConsumerPolicy, FetchPolicy, ProducerPolicy
from onceward.task.source import Source
from onceward.task.work import Outcome
from onceward.transaction import Transaction

# The seam for consumers with a contract: what their inbox puts around the source and the main step.
#
# The engine knows no database. A task that has a `contract` names an inbox among its services, and the inbox serves
# the calls of that task. `onceward.inbox` has the implementations.


SERVICE = "inbox"
"""The name of the service."""


class Served(Protocol):
    """One call of a consumer, under its contract."""

    def begin(self) -> Any:
        """Refuse a consumer that may not run. Awaited in asyncio."""
        ...

    def process(self, transaction: Transaction, /) -> Any:
        """The main step: the task's method inside a session, or DUPLICATE. Awaited in asyncio."""
        ...

    def end(self) -> Any:
        """Write down what was fetched and never begun. Awaited in asyncio; never raises."""
        ...

    def around(self, source: Source) -> Source:
        """The source, with what is fetched and given back written down."""
        ...


def serve(task: BaseTask) -> Served | None:
    """How the task's inbox serves it; None for a task without a contract."""
    if getattr(task, "contract", None) is None:
        return None
    inbox = task.services.get(SERVICE)
    kind = "AsyncInbox" if task._asynchronous else "Inbox"
    if inbox is None:
        raise ConfigurationError(
            f"{task.name} has a contract, so it needs an inbox: give it services={{'{SERVICE}': {kind}(engine)}}"
        )
    serve_task = getattr(inbox, "serve", None)
    if serve_task is None or inbox.asynchronous != task._asynchronous:
        raise ConfigurationError(
            f"the service {SERVICE!r} of {task.name} must be an {kind}, not {type(inbox).__name__}"
        )
    served: Served = serve_task(task)
    return served


CONSUMER_HANDLERS = ("process_transaction", "handle_transaction_success", "handle_transaction_exception")
PRODUCER_HANDLERS = ("produce_transaction", "handle_produce_success", "handle_produce_exception")


def consumer(task: Any, policy: ConsumerPolicy | None, *, fetches: bool = True) -> Wiring:
    policy = _policy(task, policy, ConsumerPolicy, "consume_transactions")
    steps = policy.steps
    source = _source(task, steps.fetch) if fetches else None
    process = task.process_transaction
    served = serve(task)
    if served is not None:
        process = served.process
        source = None if source is None else served.around(source)
    return Wiring(
        span="consume_transactions",
        life_span="start_processing",
        policy=policy,
        main=Step.of("process", "process", process, steps.process.retry, method=task.process_transaction),
        success=Step.of("success", "handle_success", task.handle_transaction_success, steps.success.retry),
        exception=Step.of(
            "exception", "handle_exception", task.handle_transaction_exception, steps.exception.retry
        ),
        source=source,
        script=consume,
        begin=None if served is None else served.begin,
        end=None if served is None else served.end,
        postpones=source is None or source.settle is not None,
        timeout_error=ConsumerLoopTimeoutException,
    )


def producer(
    task: Any, policy: ProducerPolicy | None, transactions: Iterable[Transaction] | AsyncIterable[Transaction]
) -> Wiring:
    policy = _policy(task, policy, ProducerPolicy, "produce_transactions")
    steps = policy.steps
    return Wiring(
        span="produce_transactions",
        life_span="start_producing",
        policy=policy,
        main=Step.of(
            "produce", "produce", task.produce_transaction, steps.produce.retry, has_attempt_spans=True
        ),
        success=Step.of(
            "success",
            "handle_produce_success",
            task.handle_produce_success,
            steps.success.retry,
            has_attempt_spans=True,
            always_system=True,
        ),
        exception=Step.of(
            "exception",
            "handle_produce_exception",
            task.handle_produce_exception,
            steps.exception.retry,
            has_attempt_spans=True,
        ),
        source=None,
        script=partial(produce, take=_taker(task, transactions)),
        timeout_error=ProducerLoopTimeoutException,
    )


def _taker(task: BaseTask, transactions: Any) -> Any:
    if task._asynchronous and isinstance(transactions, AsyncIterable):
        return AsyncBatches(transactions)
    if not isinstance(transactions, Iterable) or isinstance(transactions, (str, bytes, Transaction, dict)):
        raise ConfigurationError(
            f"produce_transactions of {task.name} takes an iterable of Transaction, not {type(transactions).__name__}"
        )
    return AsyncBatches(transactions) if task._asynchronous else Batches(transactions)


class Kept:
    """A wiring for one transaction, and the place its outcome is kept."""

    def __init__(self, wiring: Wiring, transaction: Transaction, take: Any) -> None:
        self._transaction = transaction
        self._outcome: Outcome | None = None
        script = partial(produce, take=take)
        self.wiring = msgspec.structs.replace(wiring, source=None, script=script, on_outcome=self._keep)

    def _keep(self, outcome: Outcome) -> None:
        self._outcome = outcome

    @property
    def outcome(self) -> Outcome:
        if self._outcome is None:
            raise LoopError(
                f"transaction {self._transaction.id} was not started: the task was stopped, or limit is 0"
            )
        return self._outcome


def one(wiring: Wiring, transaction: Transaction, asynchronous: bool) -> Kept:
    take = AsyncBatches([transaction]) if asynchronous else Batches([transaction])
    return Kept(wiring, transaction, take)


def _policy(task: BaseTask, policy: Any, cls: Any, method: str) -> Any:
    if policy is None:
        return cls()
    if not isinstance(policy, cls):
        raise ConfigurationError(
            f"{method} of {task.name} takes a {cls.__name__}, not {type(policy).__name__}; "
            f"a dict becomes one with {cls.__name__}.model_validate(…)"
        )
    return policy


# ── the source ──────────────────────────────────────────────────────────────────────────────────────────


def _source(task: BaseTask, policy: FetchPolicy) -> Source:
    name = _source_name(task, policy.connector_name)
    connector = task.connectors[name]
    fetch = getattr(connector, task._fetch_method, None)
    if fetch is None:
        raise ConfigurationError(
            f"connector {name!r} of {task.name} ({type(connector).__name__}) has no {task._fetch_method}; "
            "name another one in steps.fetch.connector_name"
        )
    suffix = "_async" if task._asynchronous else ""
    settle = getattr(connector, "settle_transactions" + suffix, None)
    extend = getattr(connector, "extend_transactions" + suffix, None)
    return Source(
        fetch=Step.of("fetch", "fetch_transactions", fetch, policy.retry),
        extra=policy.extra,
        settle=None if settle is None else Step.of("settle", "settle_transactions", settle, policy.retry),
        extend=None if extend is None else Step.of("extend", "extend_transactions", extend, policy.retry),
        lease=getattr(connector, "lease", float("inf")),
    )


def _source_name(task: BaseTask, wanted: str | None) -> str:
    names = ", ".join(map(repr, task.connectors))
    if wanted is not None:
        if wanted not in task.connectors:
            raise ConfigurationError(f"{task.name} has no connector {wanted!r}; it has {names or 'none'}")
        return wanted
    if len(task.connectors) == 1:
        return next(iter(task.connectors))
    if "source" in task.connectors:
        return "source"
    raise ConfigurationError(
        f"{task.name} has the connectors {names}; say which to fetch from in steps.fetch.connector_name, "
        "or call it 'source'"
    )


# ── checks at construction ──────────────────────────────────────────────────────────────────────────────


def check_consumer(task: BaseTask) -> None:
    """A consumer needs handlers of its kind and at least one connector to fetch from."""
    check_handlers(task, CONSUMER_HANDLERS)
    if any(callable(getattr(connector, task._fetch_method, None)) for connector in task.connectors.values()):
        return
    kind = "asynchronous" if task._asynchronous else "synchronous"
    for name, connector in task.connectors.items():
        if callable(getattr(connector, task._other_fetch_method, None)):
            cls = type(connector).__name__
            other = f"Async{cls}" if task._asynchronous else cls.removeprefix("Async")
            raise ConfigurationError(
                f"{task.name} is {kind}, but its connector {name!r} ({cls}) has only {task._other_fetch_method}; "
                f"give it one with {task._fetch_method} (perhaps {other}), or use "
                f"{'ConsumerTask' if task._asynchronous else 'AsyncConsumerTask'}"
            )
    have = ", ".join(f"{name!r} ({type(each).__name__})" for name, each in task.connectors.items()) or "none"
    raise ConfigurationError(
        f"{task.name} has nothing to consume from: none of its connectors ({have}) has {task._fetch_method}(batch_size)"
    )


def check_handlers(task: BaseTask, names: Iterable[str]) -> None:
    """The main one is there; those of an asynchronous task are `async def`, those of the other are not."""
    for name in names:
        handler = getattr(task, name)
        if getattr(handler, "__func__", None) in REQUIRED:
            raise ConfigurationError(
                f"{task.name} does not define {name}(self, transaction); it has nothing to do"
            )
        if not task._asynchronous and inspect.iscoroutinefunction(handler):
            raise ConfigurationError(
                f"{task.name}.{name} is `async def`, but {task.name} runs in threads; "
                "derive it from the Async… class, or make it a plain `def`"
            )
        function = getattr(handler, "__func__", None)
        plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
        if task._asynchronous and plain and not inspect.iscoroutinefunction(handler):
            raise ConfigurationError(
                f"{task.name}.{name} is a plain `def`, but {task.name} runs in asyncio; make it `async def`"
            )
