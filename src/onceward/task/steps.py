"""What one step is, and what follows when an attempt at it fails. Plain values and functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import inf
from typing import Any

import msgspec

from onceward.task.clock import LONGEST_SLEEP
from onceward.task.exceptions import ExceptionCategory, IOGuardError, TransactionException
from onceward.task.mixins.policies import RetryPolicy
from onceward.task.reply import Failed, Limit


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a plan: what to call, and how often and how long."""

    name: str
    span: str
    call: Callable[..., Any]
    max_attempts: int
    timeout: float | None
    backoff: float
    backoff_multiplier: float
    backoff_cap: float
    method: Callable[..., Any] | None = None
    """The task's own part of `call`, where that is not all of it."""
    always_system: bool = False
    """Whatever it raises is SYSTEM, also if it says otherwise."""
    has_attempt_spans: bool = False
    """A span for the step and one inside it for each attempt, instead of one for each attempt."""
    silent: bool = False
    """Nobody listens: the task does not define this handler, and there is no telemetry."""

    @classmethod
    def of(cls, name: str, span: str, call: Callable[..., Any], retry: RetryPolicy, **more: Any) -> Step:
        return cls(
            name=name,
            span=span,
            call=call,
            max_attempts=retry.max_attempts,
            timeout=retry.timeout,
            backoff=retry.backoff,
            backoff_multiplier=retry.backoff_multiplier,
            backoff_cap=retry.backoff_cap,
            **more,
        )


class Decision(msgspec.Struct, frozen=True):
    """What follows a failed attempt: another one after `delay` seconds, or none when `delay` is None."""

    error: TransactionException
    delay: float | None


def compute_backoff(backoff: float, multiplier: float, cap: float, attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt`, counted from 0.

    `backoff * multiplier ** attempt`, and at most `cap` when `cap` is above 0. Never overflows, and is never
    longer than a thread can sleep, which is some decades.
    """
    try:
        delay = backoff * multiplier**attempt if backoff else 0.0
    except OverflowError:
        delay = inf
    return min(delay, cap if cap > 0 else LONGEST_SLEEP, LONGEST_SLEEP)


def decide(step: Step, attempt: int, failed: Failed, transaction_id: str | None) -> Decision:
    """The one place that says which errors are retried, and when."""
    error = classify(step, attempt, failed, transaction_id)
    final = (
        error.category is ExceptionCategory.BUSINESS
        or failed.stuck
        or failed.limit is Limit.TRANSACTION
        or isinstance(failed.error, IOGuardError)
        or attempt + 1 >= step.max_attempts
    )
    if final:
        return Decision(error, None)
    return Decision(error, compute_backoff(step.backoff, step.backoff_multiplier, step.backoff_cap, attempt))


def classify(step: Step, attempt: int, failed: Failed, transaction_id: str | None) -> TransactionException:
    """The error of a failed attempt as a `TransactionException`, with the original as its cause."""
    error = failed.error
    if failed.limit is not None:
        what = {
            Limit.STEP: f"attempt {attempt + 1} of {step.name} took longer than {step.timeout} s",
            Limit.TRANSACTION: f"the lifecycle ran out of time in {step.name}, attempt {attempt + 1}",
            Limit.LOOP: f"the loop ran out of time in {step.name}, attempt {attempt + 1}",
        }[failed.limit]
        more = ", and has not ended since; its slot is stuck" if failed.stuck else ""
        return TransactionException(what + more, ExceptionCategory.TIMEOUT, transaction_id, error)
    if isinstance(error, TransactionException):
        if step.always_system and error.category is not ExceptionCategory.SYSTEM:
            return TransactionException(error.message, ExceptionCategory.SYSTEM, transaction_id, error)
        if error.transaction_id is None:
            error.transaction_id = transaction_id
        elif error.transaction_id != transaction_id:
            # One error object was raised for several transactions: each gets its own.
            error = copy.copy(error)
            error.transaction_id = transaction_id
        return error
    return TransactionException(text_of(error), ExceptionCategory.SYSTEM, transaction_id, error)


def text_of(error: BaseException | None) -> str:
    """What kind of error it is and what it says."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  the error of an error must not hide it
        said = "(its text cannot be shown)"
    if isinstance(error, TransactionException):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def line_of(error: BaseException) -> str:
    """The same in one line, for the log: what a database says may fill a page."""
    return " ".join(text_of(error).split())
