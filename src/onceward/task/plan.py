"""Turn a task and a policy into what the engine runs, and check early that it can work."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any

import msgspec

from onceward._environment import NO_CONTRACT, is_production
from onceward._functions import awaiting
from onceward._sync import as_coroutine, as_function
from onceward.errors import ConfigurationError
from onceward.middleware import Middleware, SourceCalls
from onceward.task.base import BaseTask
from onceward.task.call import Wiring
from onceward.task.exceptions import ConsumerLoopTimeoutException, LoopError, ProducerLoopTimeoutException
from onceward.task.guards.receipt import guard_of
from onceward.task.io_guard import IoGuard
from onceward.task.lifecycle import Step
from onceward.task.loops import AsyncBatches, Batches, consume, produce
from onceward.task.mixins.policies import ConsumerPolicy, FetchPolicy, ProducerPolicy
from onceward.task.source import Source
from onceward.task.work import Outcome
from onceward.transaction import Transaction

SERVICE = "inbox"
"""The name of the service that enforces a task's contract."""


def consumer(task: Any, policy: ConsumerPolicy | None, *, fetches: bool = True) -> Wiring:
    task._ensure_checked()
    _check_contract(task)
    policy = _policy(task, policy, ConsumerPolicy, "consume_transactions")
    steps = policy.steps
    chain = _chain(task)
    source = _source(task, steps.fetch, chain) if fetches else None
    guard = guard_of(chain)
    # What wraps the inbox must see the end of an attempt, not a promise of one.
    grouping: Any = (
        next((each.grouping for each in chain if each.keeps_contract), None) if guard is None else None
    )
    if grouping is not None and grouping.batches:
        grouping.size = policy.loop.batch.size
    return Wiring(
        span="consume_transactions",
        life_span="start_processing",
        policy=policy,
        main=Step.of("process", "process", task.process_transaction, steps.process.retry),
        success=Step.of("success", "handle_success", task.handle_transaction_success, steps.success.retry),
        exception=Step.of(
            "exception", "handle_exception", task.handle_transaction_exception, steps.exception.retry
        ),
        source=source,
        script=consume,
        chain=chain,
        guard=guard,
        grouping=grouping,
        postpones=source is None or source.settle is not None,
        timeout_error=ConsumerLoopTimeoutException,
    )


def producer(
    task: Any, policy: ProducerPolicy | None, transactions: Iterable[Transaction] | AsyncIterable[Transaction]
) -> Wiring:
    task._ensure_checked()
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
        chain=_chain(task),
        timeout_error=ProducerLoopTimeoutException,
    )


def _taker(task: BaseTask, transactions: Any) -> Any:
    if task.asynchronous and isinstance(transactions, AsyncIterable):
        return AsyncBatches(transactions)
    if not isinstance(transactions, Iterable) or isinstance(transactions, (str, bytes, Transaction, dict)):
        raise ConfigurationError(
            f"produce_transactions of {task.name} takes an iterable of Transaction, not {type(transactions).__name__}"
        )
    return AsyncBatches(transactions) if task.asynchronous else Batches(transactions)


class SingleRun:
    """Runs one transaction, and holds its outcome."""

    def __init__(self, wiring: Wiring, transaction: Transaction, take: Any) -> None:
        self._transaction = transaction
        self._outcome: Outcome | None = None
        script = partial(produce, take=take)
        self.wiring = msgspec.structs.replace(wiring, source=None, script=script, on_outcome=self._record)

    def _record(self, outcome: Outcome) -> None:
        self._outcome = outcome

    @property
    def outcome(self) -> Outcome:
        if self._outcome is None:
            raise LoopError(
                f"transaction {self._transaction.id} was not started: the task was stopped, or limit is 0"
            )
        return self._outcome


def single_run(wiring: Wiring, transaction: Transaction, asynchronous: bool) -> SingleRun:
    """Wire a single transaction, which needs no source."""
    take = AsyncBatches([transaction]) if asynchronous else Batches([transaction])
    return SingleRun(wiring, transaction, take)


def _policy(task: BaseTask, policy: Any, cls: Any, method: str) -> Any:
    if policy is None:
        return cls()
    if not isinstance(policy, cls):
        raise ConfigurationError(
            f"{method} of {task.name} takes a {cls.__name__}, not {type(policy).__name__}; "
            f"a dict becomes one with {cls.__name__}.model_validate(…)"
        )
    return policy


def _check_contract(task: BaseTask) -> None:
    """Raise if this is production and the task's code does not say which contract it has, not even None."""
    if getattr(task, "contract", None) is not None or not is_production(None):
        return
    own = [each for each in type(task).__mro__ if not each.__module__.startswith("onceward.task.")]
    if not any("contract" in vars(each) for each in (task, *own)):
        raise ConfigurationError(f"{task.name} does not run in production: {NO_CONTRACT}")


# ── middleware ──────────────────────────────────────────────────────────────────────────────────────────


def _chain(task: BaseTask) -> list[Middleware]:
    """The middleware of one call, outermost first. If telemetry is on, `Call` wraps it around this chain."""
    chain = [each.bind(task) for each in task.middleware]
    if task.settings.io_guard != "off":
        chain.insert(0, IoGuard(task, raises=task.settings.io_guard == "raise"))
    if getattr(task, "contract", None) is not None and not any(
        each.keeps_contract for each in task.middleware
    ):
        chain.append(_inbox(task).middleware().bind(task))
    return chain


def _inbox(task: BaseTask) -> Any:
    inbox = task.services.get(SERVICE)
    kind = "AsyncInbox" if task.asynchronous else "Inbox"
    if inbox is None:
        raise ConfigurationError(
            f"{task.name} has a contract, so it needs an inbox: pass services={{'{SERVICE}': {kind}(engine)}}"
        )
    if getattr(inbox, "middleware", None) is None or inbox.asynchronous != task.asynchronous:
        raise ConfigurationError(
            f"the service {SERVICE!r} of {task.name} must be an {kind}, not {type(inbox).__name__}"
        )
    return inbox


# ── the source ──────────────────────────────────────────────────────────────────────────────────────────


def _source(task: BaseTask, policy: FetchPolicy, chain: Sequence[Middleware]) -> Source:
    name = _source_name(task, policy.connector_name)
    connector = task.connectors[name]
    suffix = "_async" if task.asynchronous else ""
    calls = {
        each: getattr(connector, f"{each}_transactions{suffix}", None)
        for each in ("fetch", "settle", "extend", "await")
    }
    if calls["fetch"] is None:
        raise ConfigurationError(
            f"connector {name!r} of {task.name} ({type(connector).__name__}) has no {task._fetch_method}; "
            "choose another connector in steps.fetch.connector_name"
        )
    lease = getattr(connector, "lease", inf)
    if any(type(each).wrap_source is not Middleware.wrap_source for each in chain):
        calls, lease = _wrap_source(connector, calls, lease, suffix, chain)
    wait = calls.pop("await")
    steps = {
        each: None if call is None else Step.of(each, f"{each}_transactions", call, policy.retry)
        for each, call in calls.items()
    }
    assert steps["fetch"] is not None
    return Source(
        fetch=steps["fetch"],
        extra=policy.extra,
        settle=steps["settle"],
        extend=steps["extend"],
        wait=wait,
        lease=lease,
        prompt=getattr(connector, "in_lines", False),
        is_suspect=getattr(connector, "is_suspect", None),
        extend_from_thread=getattr(connector, "extend_from_thread", None) if task.asynchronous else None,
    )


def _wrap_source(
    connector: Any, calls: dict[str, Any], lease: float, suffix: str, chain: Sequence[Middleware]
) -> tuple[dict[str, Any], float]:
    """Wrap the calls and the lease of a source in the middleware."""
    awaitable = awaiting if suffix else as_coroutine

    async def ask(method: str, *args: Any) -> Any:
        return await awaitable(getattr(connector, method + suffix))(*args)

    awaitables: dict[str, Any] = {
        each: None if call is None else awaitable(call) for each, call in calls.items()
    }
    awaitables["wait"] = awaitables.pop("await")
    source = SourceCalls(connector=connector, ask=ask, lease=lease, **awaitables)
    for each in reversed(chain):
        source = each.wrap_source(source)
    wrapped = {each: getattr(source, "wait" if each == "await" else each) for each in calls}
    if not suffix:
        wrapped = {each: None if call is None else as_function(call) for each, call in wrapped.items()}
    return wrapped, source.lease


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
        f"{task.name} has the connectors {names}; choose one to fetch from in steps.fetch.connector_name, "
        "or name it 'source'"
    )
