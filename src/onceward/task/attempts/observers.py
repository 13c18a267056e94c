"""Middleware that looks on at attempts, in plain functions.

A middleware that wraps a step is a coroutine around each attempt, which costs more than a quick handler. One that has
nothing to wait for observes instead: what is observed nearest to the handler is one call, however many look on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from time import perf_counter
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
        the end of the attempt. This one, which notes the time, is not even called for the innermost."""
        return perf_counter()

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
            except Exception as error:  # noqa: BLE001  observers judge it, and it is raised again
                raise _judged(raised, transaction, note, error)  # noqa: B904  it has its cause
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


class _Nobody(StepObserver):
    """Sees nothing."""

    def begins(self, transaction: Transaction) -> None:
        pass

    def returned(self, transaction: Transaction, note: Any, result: Any) -> None:
        pass

    def raised(self, transaction: Transaction, note: Any, error: Exception) -> Exception:
        return error


class _Both(StepObserver):
    """Two observers as one."""

    def __init__(self, outer: StepObserver, inner: StepObserver) -> None:
        self._outer, self._inner = outer, inner

    def begins(self, transaction: Transaction) -> Any:
        return self._outer.begins(transaction), self._inner.begins(transaction)

    def returned(self, transaction: Transaction, note: Any, result: Any) -> None:
        self._inner.returned(transaction, note[1], result)
        self._outer.returned(transaction, note[0], result)

    def raised(self, transaction: Transaction, note: Any, error: Exception) -> Exception:
        return self._outer.raised(transaction, note[0], self._inner.raised(transaction, note[1], error))


def _judged(
    raised: Callable[..., Exception], transaction: Transaction, note: Any, error: Exception
) -> Exception:
    """What observers make of an error, with that as its cause."""
    judged = raised(transaction, note, error)
    if judged is not error:
        judged.__cause__ = error
    return judged


def observed(
    function: Callable[..., Any], observers: Sequence[StepObserver], *, asynchronous: bool
) -> Callable[..., Any]:
    """Call a handler while these look on, outermost first. Two of them, as a run without a contract has, are called
    from here; if there are more, all but the innermost are one."""
    *others, inner = observers
    outer = reduce(_Both, others) if others else _Nobody()
    begins, returned, raised = inner.begins, inner.returned, inner.raised
    notes_time = type(inner).begins is StepObserver.begins
    outer_begins, outer_returned, outer_raised = outer.begins, outer.returned, outer.raised
    name = name_of(function)

    def failure(
        transaction: Transaction, note: Any, outer_note: Any, error: BaseException, generation: int
    ) -> BaseException:
        """What an attempt raises that has raised this."""
        if forks.generation != generation:
            end_child(name, error)
        if not isinstance(error, Exception):
            return error

        def both_raised(transaction: Transaction, note: Any, error: Exception) -> Exception:
            return outer_raised(transaction, outer_note, raised(transaction, note, error))

        return _judged(both_raised, transaction, note, error)

    def call(transaction: Transaction, /) -> Any:
        generation = forks.generation
        outer_note = outer_begins(transaction)
        note = perf_counter() if notes_time else begins(transaction)
        try:
            result = function(transaction)
            if forks.generation != generation:
                end_child(name)
            if result is not None:
                check_result(result, function)
        except BaseException as error:  # noqa: BLE001  observers judge it, and it is raised again
            raise failure(transaction, note, outer_note, error, generation)  # noqa: B904  it has its cause
        returned(transaction, note, result)
        outer_returned(transaction, outer_note, result)
        return result

    async def call_async(transaction: Transaction, /) -> Any:
        generation = forks.generation
        outer_note = outer_begins(transaction)
        note = perf_counter() if notes_time else begins(transaction)
        try:
            given = function(transaction)
            result = await (given if type(given) is CoroutineType else check_awaitable(given, function))
            if forks.generation != generation:
                end_child(name)
            if result is not None:
                check_result(result, function)
        except BaseException as error:  # noqa: BLE001  observers judge it, and it is raised again
            raise failure(transaction, note, outer_note, error, generation)  # noqa: B904  it has its cause
        returned(transaction, note, result)
        outer_returned(transaction, outer_note, result)
        return result

    return call_async if asynchronous else call
