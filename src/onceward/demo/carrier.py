"""An outside service, as they are: slow, flaky, sometimes silent, and sometimes right to refuse."""

from __future__ import annotations

import time
from collections import Counter

from onceward.demo.orders import Fate, Order

FLAKY_TIMES = 2
HANGING_SECONDS = 10.0
"""Far beyond the step's timeout, which is expected to end it."""


class NotDelivered(Exception):
    """Asking again would give the same answer."""


class Carrier:
    """Says whether it goes where an order is to go. Only looks: being asked twice must not matter.

    Its memory is that of the process, so an order that moves to another worker finds it as moody as before.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._asked: Counter[str] = Counter()

    def check(self, order: Order) -> None:
        """Returns if it goes there."""
        self._asked[order.id] += 1
        asked = self._asked[order.id]
        time.sleep(self._seconds)
        if order.fate is Fate.REFUSED:
            raise NotDelivered(f"the carrier does not go where {order.id} is to go")
        if order.fate is Fate.FLAKY and asked <= FLAKY_TIMES:
            raise ConnectionResetError("the carrier's service hung up")
        if order.fate is Fate.HANGING and asked == 1:
            _hang()
        if order.fate is Fate.POISON:
            raise RuntimeError("the carrier's service cannot make sense of this order")


def _hang() -> None:
    # Many short sleeps: the engine's interrupt reaches a thread when it is back in Python.
    end = time.monotonic() + HANGING_SECONDS
    while time.monotonic() < end:
        time.sleep(0.01)
