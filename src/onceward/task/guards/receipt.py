"""The receipt of an attempt: whether the inbox has recorded its outcome, whatever the middleware around it returns.

A middleware may catch an error and return. The engine would take that for success and acknowledge a message of which
nothing was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from onceward.middleware import Middleware, StepCall, StepInfo
from onceward.task.exceptions import UnrecordedError
from onceward.transaction import Transaction


class Receipt:
    """One attempt at one transaction of one consumer."""

    __slots__ = ("keeper", "signed")

    def __init__(self, keeper: Middleware) -> None:
        self.keeper = keeper
        """The inbox of the consumer. A handler may run other consumers, which have their own."""
        self.signed = False


_receipt: ContextVar[Receipt | None] = ContextVar("onceward_receipt", default=None)


def sign(keeper: Middleware) -> None:
    """The inbox has recorded that the event is done, or was before."""
    receipt = _receipt.get()
    if receipt is not None and receipt.keeper is keeper:
        receipt.signed = True


class ReceiptGuard(Middleware):
    """Outside of all middleware of the user's: fails an attempt that returns without the record of the inbox."""

    name = "receipt"

    def __init__(self, keeper: Middleware, outside: Sequence[Middleware]) -> None:
        self._keeper = keeper
        self._names = " ─► ".join(each.name for each in (*outside, keeper))

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        if step.name != "process":
            return call

        async def process(transaction: Transaction, *rest: Any) -> Any:
            receipt = Receipt(self._keeper)
            before = _receipt.get()
            _receipt.set(receipt)
            try:
                result = await call(transaction, *rest)
            finally:
                _receipt.set(before)  # not `reset`: a coroutine may be closed in another context
            if not receipt.signed:
                raise UnrecordedError(
                    f"the middleware returned, but the inbox has not recorded {transaction.id} as done, so nothing was "
                    f"committed and this attempt has failed. In {self._names}, one caught an error or did not await "
                    "the call it wraps: raise what you catch. To skip a message, return from the handler instead"
                )
            return result

        return process


def guard_of(chain: Sequence[Middleware]) -> ReceiptGuard | None:
    """The guard of a chain, outermost first; None if nothing of the user's outside of the inbox wraps steps."""
    keepers = [number for number, each in enumerate(chain) if each.keeps_contract]
    outside = [each for each in chain[: keepers[0]] if wraps_steps(each)] if keepers else []
    return ReceiptGuard(chain[keepers[0]], outside) if outside else None


def wraps_steps(middleware: Middleware) -> bool:
    ours = type(middleware).__module__.startswith("onceward.")  # none of these catches an error and returns
    return not ours and getattr(middleware.wrap_step, "__func__", None) is not Middleware.wrap_step
