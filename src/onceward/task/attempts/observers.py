"""Middleware that looks on at attempts, in plain functions.

A middleware that wraps a step is a coroutine around each attempt, which costs more than a quick handler. One that has
nothing to wait for observes instead: what is observed nearest to the handler is one call, however many look on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CoroutineType
from typing import Any

from onceward._functions import check_awaitable, check_result, name_of
from onceward._process.forks import end_child, forks
from onceward.middleware import Middleware, StepCall, StepInfo
from onceward.transaction import Transaction


class StepObserver:
    """Looks on at the attempts at one step."""

    def begins(self, transaction: Transaction) -> Any:
        """Called before an attempt, which is not made if this raises; no other observer sees that. Returns a note for
        the end of the attempt."""
        raise NotImplementedError

    def returned(self, transaction: Transaction, note: Any, result: Any) -> None:
        """The attempt has returned."""
        raise NotImplementedError

    def raised(self, transaction: Transaction, note: Any, error: Exception) -> Exception:
        """The attempt has failed. Returns what it raises instead, or the same error."""
        raise NotImplementedError


class ObservingMiddleware(Middleware):
    """A middleware that observes steps instead of wrapping them."""

    def observer(self, step: StepInfo) -> StepObserver | None:
        """What looks on at this step, if anything does."""
        raise NotImplementedError

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        """For a chain that has others between this one and the handler."""
        observer = self.observer(step)
        if observer is None:
            return call
        begins, returned, raised = observer.begins, observer.returned, observer.raised

        async def observed(transaction: Transaction, *more: Any) -> Any:
            note = begins(transaction)
            try:
                result = await call(transaction, *more)
            except Exception as error:
                judged = raised(transaction, note, error)
                if judged is error:
                    raise
                raise judged from error
            returned(transaction, note, result)
            return result

        return observed


def split(chain: Sequence[Middleware], step: StepInfo) -> tuple[Sequence[Middleware], list[StepObserver]]:
    """The middleware that wraps a step, and the observers between it and the handler; outermost first."""
    if any(each.keeps_contract for each in chain):
        return chain, []  # an inbox gives the handler more than the transaction
    observers: list[StepObserver] = []
    for number in range(len(chain), 0, -1):
        each = chain[number - 1]
        if isinstance(each, ObservingMiddleware):
            observer = each.observer(step)
            if observer is not None:
                observers.insert(0, observer)
        elif getattr(each.wrap_step, "__func__", None) is not Middleware.wrap_step:
            return chain[:number], observers
    return (), observers


Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
"""Those of an observer, or of several as one."""


def _with(outer: StepObserver, begins: Any, returned: Any, raised: Any) -> Functions:
    """The functions of an inner observer, with those of one around it."""
    outer_begins, outer_returned, outer_raised = outer.begins, outer.returned, outer.raised

    def both_begin(transaction: Transaction) -> Any:
        return outer_begins(transaction), begins(transaction)

    def both_returned(transaction: Transaction, note: Any, result: Any) -> None:
        returned(transaction, note[1], result)
        outer_returned(transaction, note[0], result)

    def both_raised(transaction: Transaction, note: Any, error: Exception) -> Any:
        return outer_raised(transaction, note[0], raised(transaction, note[1], error))

    return both_begin, both_returned, both_raised


def observed(
    function: Callable[..., Any], observers: Sequence[StepObserver], *, asynchronous: bool
) -> Callable[..., Any]:
    """Call a handler while these look on, outermost first."""
    *outer, observer = observers
    begins, returned, raised = observer.begins, observer.returned, observer.raised
    for each in reversed(outer):
        begins, returned, raised = _with(each, begins, returned, raised)
    name = name_of(function)

    def fail(transaction: Transaction, note: Any, error: Exception) -> Exception:
        judged = raised(transaction, note, error)
        if judged is not error:
            judged.__cause__ = error
        return judged

    def call(transaction: Transaction, /) -> Any:
        generation = forks.generation
        note = begins(transaction)
        try:
            result = function(transaction)
            if forks.generation != generation:
                end_child(name)
            if result is not None:
                check_result(result, function)
        except BaseException as error:
            if forks.generation != generation:
                end_child(name, error)
            if not isinstance(error, Exception):
                raise
            raise fail(transaction, note, error)  # noqa: B904  it has its cause
        returned(transaction, note, result)
        return result

    async def call_async(transaction: Transaction, /) -> Any:
        generation = forks.generation
        note = begins(transaction)
        try:
            given = function(transaction)
            result = await (given if type(given) is CoroutineType else check_awaitable(given, function))
            if forks.generation != generation:
                end_child(name)
            if result is not None:
                check_result(result, function)
        except BaseException as error:
            if forks.generation != generation:
                end_child(name, error)
            if not isinstance(error, Exception):
                raise
            raise fail(transaction, note, error)  # noqa: B904  it has its cause
        returned(transaction, note, result)
        return result

    return call_async if asynchronous else call
