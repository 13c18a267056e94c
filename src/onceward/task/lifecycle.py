"""The lifecycle of one transaction, for consumers and producers, in threads and asyncio.

    START ──► main step (process or produce)
                ├─ DUPLICATE: done before ──────────────────────────► SUCCEEDED, as a duplicate
                ├─ raised Postponed ────────────────────────────────► POSTPONED
                ├─ returned ─────────────────► success handler
                │                                ├─ returned ────────► SUCCEEDED
                │                                └─ gave up ──┐
                └─ BUSINESS, or gave up, or out of time ──────┴──► exception handler ──► FAILED

Each step has its own attempts, timeout and backoff (`retry` below). Rules:

* BUSINESS is never retried. Anything a producer's success handler raises, even BUSINESS, counts as SYSTEM.
* A step that times out is TIMEOUT and retried; a stuck step forfeits its remaining attempts.
* When `transaction_timeout` runs out, the lifecycle is TIMEOUT: the exception handler runs, under its own policy,
  unless it has run before. After any other failure, however late, the handler has `transaction_timeout` for itself.
* When the loop's own time runs out, or the call is hurried or canceled, the transaction is abandoned as in a crash.
* Postponed does not count as an attempt. If the source cannot take the transaction back, it waits here, until the
  call is ending.
* If the exception handler gives up too, its last error is the outcome's error.

`decide`, a plain function, decides what follows an attempt.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NoReturn, Protocol, cast

import msgspec

from onceward._functions import explain_unrun, has_run, name_of
from onceward._process.forks import end_child, forks
from onceward.backoff import Backoff
from onceward.task.exceptions import (
    ExceptionCategory,
    IOGuardError,
    Postponed,
    TransactionException,
    UnawaitedError,
    delay_of,
    failure_category,
    unawaited_error,
)
from onceward.task.mixins.policies import RetryPolicy
from onceward.task.script import ENDING, Exited, Failed, Script, TimeLimit
from onceward.task.work import (
    ABANDONED,
    DUPLICATE,
    FAILED,
    LOOP,
    POSTPONED,
    SUCCEEDED,
    CallPlan,
    Life,
    Outcome,
    Work,
)
from onceward.telemetry.context import current_work
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.redaction import message_with_notes, redact, scrub

logger = OwnLogger(logging.getLogger("onceward.engine"))


MAIN_STEPS = ("process", "produce")
NEVER_RETRIED = (IOGuardError, UnawaitedError)
"""Errors of the code: it would do the same again."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a lifecycle: what to call, how often, and for how long."""

    name: str
    span: str
    call: Callable[..., Any]
    max_attempts: int
    timeout: float | None
    backoff: Backoff
    always_system: bool = False
    """Whatever it raises is SYSTEM, even if the error has another category."""
    has_attempt_spans: bool = False
    """One span for the step with a child span per attempt, instead of one span per attempt."""
    silent: bool = False
    """Nothing to call: the task does not define this handler, and no middleware wraps it."""

    @classmethod
    def of(cls, name: str, span: str, call: Callable[..., Any], retry: RetryPolicy, **more: Any) -> Step:
        return cls(
            name=name,
            span=span,
            call=call,
            max_attempts=retry.max_attempts,
            timeout=retry.timeout,
            backoff=Backoff(retry.backoff, retry.backoff_multiplier, retry.backoff_cap),
            **more,
        )

    def category_of(self, error: BaseException) -> ExceptionCategory | None:
        """The category of what an attempt raised; None if it is a postponement, which only the main step can raise."""
        if isinstance(error, Postponed) and self.name in MAIN_STEPS:
            return None
        return ExceptionCategory.SYSTEM if self.always_system else failure_category(error)


class Decision(msgspec.Struct, frozen=True):
    """What follows a failed attempt: another one after `delay` seconds, or none if `delay` is None."""

    error: TransactionException
    delay: float | None


def decide(step: Step, attempt: int, failed: Failed, transaction_id: str | None) -> Decision:
    """Decide whether a failed attempt is retried, and when. Nothing else does."""
    error = classify(step, attempt, failed, transaction_id)
    final = (
        error.category is ExceptionCategory.BUSINESS
        or failed.stuck
        or failed.limit is TimeLimit.TRANSACTION
        or isinstance(failed.error, NEVER_RETRIED)
        or attempt + 1 >= step.max_attempts
    )
    if final:
        return Decision(error, None)
    return Decision(error, step.backoff.delay(attempt))


def classify(step: Step, attempt: int, failed: Failed, transaction_id: str | None) -> TransactionException:
    """Return the error of a failed attempt as a `TransactionException`, with the original as its cause."""
    error = failed.error
    if failed.limit is not None:
        what = {
            TimeLimit.STEP: f"attempt {attempt + 1} of {step.name} took longer than {step.timeout} s",
            TimeLimit.TRANSACTION: f"the lifecycle ran out of time in {step.name}, attempt {attempt + 1}",
            TimeLimit.LOOP: f"the loop ran out of time in {step.name}, attempt {attempt + 1}",
        }[failed.limit]
        more = ", and has not ended since; its slot is stuck" if failed.stuck else ""
        return TransactionException(what + more, ExceptionCategory.TIMEOUT, transaction_id, error)
    if not isinstance(error, TransactionException):
        return TransactionException(text_of(error), ExceptionCategory.SYSTEM, transaction_id, error)
    category = failure_category(error)
    if step.always_system and category is not ExceptionCategory.SYSTEM:
        return TransactionException(message_of(error), ExceptionCategory.SYSTEM, transaction_id, error)
    try:
        completed = complete(error, category, transaction_id)
        str(completed)  # sources and logs show it
    except Exception:  # noqa: BLE001  a subclass that cannot be shown, or whose attributes cannot be read or set
        return TransactionException(message_of(error), category, transaction_id, error)
    return completed


def complete(
    error: TransactionException, category: ExceptionCategory, transaction_id: str | None
) -> TransactionException:
    """Set what a task may have left out, or given as text."""
    if error.transaction_id is None:
        error.transaction_id = transaction_id
    elif error.transaction_id != transaction_id:
        # The same error object was raised for several transactions: each gets a copy.
        error = copy.copy(error)
        error.transaction_id = transaction_id
    if error.category is not category:
        error.category = category
    return error


def message_of(error: TransactionException) -> str:
    """Its message, or its type if it has none, or if a subclass does not let it be read."""
    try:
        return str(error.message) or type(error).__name__
    except Exception:  # noqa: BLE001  a property of user code
        return type(error).__name__


def text_of(error: BaseException | None) -> str:
    """The type, message and notes of an error, without the values that it quotes."""
    try:
        scrub(error)
        message = redact(message_with_notes(error), error)
    except Exception:  # noqa: BLE001  a broken __str__ must not hide the error
        message = "(its message cannot be shown)"
    if isinstance(error, TransactionException):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class LifePorts(Protocol):
    """The I/O a life needs."""

    @property
    def ending(self) -> bool:
        """Whether the call is ending, so nothing waits for a postponement any more."""
        ...

    def now(self) -> float: ...
    def invoke(
        self, work: Work, call: Callable[..., Any], arguments: tuple[Any, ...], timeout: float | None
    ) -> Any:
        """Make one attempt. Replies what it returned, `Failed` or `DISOWNED`. Also obeys `work.deadline`."""
        ...

    def pause(self, work: Work, seconds: float, postponed: bool) -> Any:
        """Sleep, but not past `work.deadline`, nor when the call is hurried or, if `postponed`, is ending.

        Without a delay, let other tasks of the event loop have their turn.
        """
        ...


def first_attempt(life: Life, ports: LifePorts) -> Any:
    """Make attempt 0 of the main step, in the life's context.

    It runs before the script because most lives need no more than this: see `early_outcome`.
    """
    current_work.set(life)
    plan = life.plan
    step = plan.main
    life.step = step.name
    if not plan.plain:
        if plan.watch is not None and not life.again:
            plan.watch.life_begins(life)
            plan.watch.step_begins(life, step)
            if not life.blocked:
                plan.watch.attempt_begins(life, step)
        if plan.limited:  # last, because telemetry may take its time
            set_limits(life, ports.now())
    if life.blocked:
        return fail_blocked(life)
    return ports.invoke(life, step.call, (life.transaction,), step.timeout)


def early_outcome(life: Life, reply: Any) -> Outcome | None:
    """The outcome, if nothing is left to do after the first attempt."""
    plan = life.plan
    if plan.generation != forks.generation:
        end_forked(plan, life.step, reply)
    if (
        plan.success.silent
        and not life.unawaited
        and (reply is None or (type(reply) is not Failed and reply is not DUPLICATE and has_run(reply)))
    ):
        return plan.unseen or Outcome(life.transaction, SUCCEEDED, reply, None, life.step)
    return None


def end_forked(plan: CallPlan, step: str, reply: Any) -> NoReturn:
    """End a child that user code has forked, instead of taking it for another worker."""
    end_child(f"{step} of {plan.task}", reply.error if type(reply) is Failed else None)


def check_reply(reply: Any, step: Step, unawaited: Sequence[str] = ()) -> Any:
    """The reply of an attempt; a failure if it returned before its code has run."""
    if unawaited and type(reply) is not Failed:
        return Failed(unawaited_error(unawaited))
    if reply is None or type(reply) is Failed or has_run(reply):
        return reply
    return Failed(TypeError(f"{name_of(step.call)} {explain_unrun(reply)}"))


def live(life: Life, ports: LifePorts, reply: Any) -> Script[Outcome | Exited]:
    """Take a transaction from the reply of its first attempt to its one outcome."""
    plan = life.plan
    transaction = life.transaction
    step = plan.main
    reply = end_attempt(life, step, reply)
    if type(reply) is Failed and not life.blocked:
        reply = yield from retry(life, step, (transaction,), ports, reply)
    if plan.watch is not None:
        leave_step(life, step, reply)
    if reply is DUPLICATE:
        return Outcome(transaction, SUCCEEDED, None, None, life.step, life.attempt, duplicate=True)
    if type(reply) is Failed and type(reply.error) is Postponed:
        return Outcome(transaction, POSTPONED, None, None, life.step, life.attempt, delay=reply.error.delay)
    if type(reply) is not Failed:
        result = reply
        if not plan.success.silent:
            reply = yield from run_step(life, plan.success, (transaction, result), ports)
        if type(reply) is not Failed:
            return Outcome(transaction, SUCCEEDED, result, None, life.step, life.attempt)
    if reply.exits:
        return Exited(cast(BaseException, reply.error))
    error = cast(TransactionException, reply.error)
    if reply.limit not in ENDING and not plan.exception.silent:
        life.handling = True
        if reply.limit is TimeLimit.TRANSACTION:
            # The handler has its own policy; the transaction's time limit no longer applies.
            life.deadline, life.limit = plan.loop_deadline, LOOP
        elif life.limit is TimeLimit.TRANSACTION:
            # The failure may have come just before the limit, or after it: the handler gets that time again.
            set_limits(life, ports.now())
        reply = yield from run_step(life, plan.exception, (transaction, error), ports)
        if type(reply) is Failed:
            if reply.exits:
                return Exited(cast(BaseException, reply.error))
            error = cast(TransactionException, reply.error)
    if type(reply) is Failed and reply.limit in ENDING:
        if reply.limit is LOOP:  # a hurry is logged when it cuts off the attempt
            logger.warning("%s was cut off; transaction %s is abandoned", life.step, life.transaction_id)
        return Outcome(transaction, ABANDONED, None, None, life.step, life.attempt)
    return Outcome(transaction, FAILED, None, error, life.step, life.attempt)


def run_step(life: Life, step: Step, arguments: tuple[Any, ...], ports: LifePorts) -> Script[Any]:
    """Run a handler, from attempt 0 until it returns or gives up."""
    life.step = step.name
    life.attempt = 0
    if life.plan.watch is not None:
        life.plan.watch.step_begins(life, step)
    reply = yield from attempt(life, step, arguments, ports)
    if type(reply) is Failed:
        reply = yield from retry(life, step, arguments, ports, reply)
    if life.plan.watch is not None:
        leave_step(life, step, reply)
    return reply


def attempt(life: Life, step: Step, arguments: tuple[Any, ...], ports: LifePorts) -> Script[Any]:
    """Make one attempt. Telemetry is outside of it, so a slow span processor costs it no time."""
    if life.plan.watch is not None:
        life.plan.watch.attempt_begins(life, step)
    if life.unawaited:
        life.unawaited = ()
    reply = yield ports.invoke, (life, step.call, arguments, step.timeout)
    return end_attempt(life, step, reply)


def end_attempt(life: Life, step: Step, reply: Any) -> Any:
    """The reply of an attempt, once it is checked and recorded."""
    if life.plan.generation != forks.generation:
        end_forked(life.plan, step.name, reply)
    if type(reply) is not Failed:
        reply = check_reply(reply, step, life.unawaited)
    if life.plan.watch is not None:
        failed = type(reply) is Failed
        life.plan.watch.attempt_ends(life, step, reply if failed else None, None if failed else reply)
    return reply


def retry(life: Life, step: Step, arguments: tuple[Any, ...], ports: LifePorts, reply: Any) -> Script[Any]:
    """Continue a step whose attempt 0 failed, until it returns or gives up.

    Returns its value, or `Failed` with the final error.
    """
    while True:
        if reply.limit in ENDING or reply.exits:
            return reply
        postponed = step is life.plan.main and reply.limit is None and isinstance(reply.error, Postponed)
        if postponed:
            if not reply.error.quiet:
                logger.info("%s is postponed for %.3g s: %s", step.name, delay_of(reply.error), reply.error)
            if life.plan.postpones or ports.ending:
                return leave_postponed(life, reply.error)
            decision = Decision(postponement_error(reply.error, life), delay_of(reply.error))
        else:
            life.timeouts += reply.limit is not None
            decision = decide(step, life.attempt, reply, life.transaction.id)
            log_failure(life, step, decision, ports.now())
            if decision.delay is None:
                return Failed(decision.error, reply.limit)
            if life.plan.watch is not None:
                life.plan.watch.record_retry(life, step, decision.delay)
            life.retries += 1
        yield ports.pause, (life, decision.delay, postponed)
        if postponed and ports.ending:
            return leave_postponed(life, reply.error)
        if decision.delay and life.deadline != inf and ports.now() >= life.deadline:
            return out_of_time(life, step, decision.error)
        life.attempt += not postponed
        reply = yield from attempt(life, step, arguments, ports)
        if type(reply) is not Failed:
            return reply


def leave_postponed(life: Life, error: Postponed) -> Failed:
    """The reply of a step that ends postponed, with a plain `Postponed` also if a subclass was raised."""
    if not life.plan.postpones:
        logger.warning(
            "%s was waiting because it is postponed, and the run is ending; transaction %s is not done",
            life.step, life.transaction_id,
        )  # fmt: skip
    return Failed(Postponed(text_of(error), delay_of(error)))


def postponement_error(postponed: Postponed, life: Life) -> TransactionException:
    """The error if time runs out during a postponement."""
    return TransactionException(text_of(postponed), ExceptionCategory.SYSTEM, life.transaction_id, postponed)


def leave_step(life: Life, step: Step, reply: Any) -> None:
    # Anything else is not a failure of the step: it was postponed, interrupted or cut off.
    failed = type(reply) is Failed and isinstance(reply.error, TransactionException)
    life.plan.watch.step_ends(life, step, reply.error if failed else None)


def out_of_time(life: Life, step: Step, last_error: TransactionException) -> Failed:
    """The reply if time runs out during a backoff."""
    reply = Failed(last_error, life.limit)
    if life.limit is TimeLimit.TRANSACTION:
        life.timeouts += 1
        reply.error = classify(step, life.attempt, reply, life.transaction_id)
        logger.error("%s gave up%s: %s", step.name, life.plan.afterwards, reply.error)
    return reply


def set_limits(life: Life, now: float) -> None:
    plan = life.plan
    life.deadline, life.limit = plan.loop_deadline, LOOP
    if plan.transaction_timeout is not None and now + plan.transaction_timeout < life.deadline:
        life.deadline, life.limit = now + plan.transaction_timeout, TimeLimit.TRANSACTION


def fail_blocked(life: Life) -> Failed:
    text = "an earlier delivery with this id is stuck and still running; this one was not started"
    error = TransactionException(text, ExceptionCategory.TIMEOUT, life.transaction_id)
    logger.error("%s", error)
    return Failed(error)


def log_failure(life: Life, step: Step, decision: Decision, now: float) -> None:
    error = " ".join(
        message_with_notes(decision.error).split()
    )  # on one line: messages of databases can be long
    attempt = life.attempt + 1  # people count from 1
    if decision.delay is not None:
        logger.warning(
            "%s failed (attempt %d of %d), next in %.3g s: %s",
            step.name, attempt, step.max_attempts, decision.delay, error,
        )  # fmt: skip
    elif decision.error.category is ExceptionCategory.BUSINESS:
        logger.warning("%s refused: %s", step.name, error)
    else:
        shown = life.plan.tracebacks.to_show(decision.error.__cause__, now)
        logger.error(
            "%s gave up (attempt %d of %d)%s: %s",
            step.name, attempt, step.max_attempts, life.plan.afterwards, error,
            exc_info=shown,
        )  # fmt: skip
