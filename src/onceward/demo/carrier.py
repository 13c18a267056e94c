"""A realistic outside service: slow, flaky, sometimes silent, and sometimes right to refuse."""

from __future__ import annotations

import threading
import time
from collections import Counter

from onceward import on_cancel
from onceward.demo.orders import DemoOrder, Fate

FLAKY_TIMES = 2
HANGING_SECONDS = 10.0
"""Far beyond the step's timeout, which must end it."""


class NotDelivered(Exception):
    """A final refusal: asking again gives the same answer."""


class Carrier:
    """Checks whether it delivers to an address. It has no effects, so checking twice does no harm.

    It counts per process, so an order that moves to another worker fails there just as often.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._asked: Counter[str] = Counter()

    def check(self, order: DemoOrder) -> None:
        """Return if it delivers the order; raise if it refuses or fails."""
        self._asked[order.id] += 1
        asked = self._asked[order.id]
        time.sleep(self._seconds)
        if order.fate is Fate.REFUSED:
            raise NotDelivered(f"the carrier does not deliver to the address of {order.id}")
        if order.fate is Fate.FLAKY and asked <= FLAKY_TIMES:
            raise ConnectionResetError("the carrier's service hung up")
        if order.fate is Fate.HANGING and asked == 1:
            _hang()
        if order.fate is Fate.POISON:
            raise RuntimeError("the carrier's service fails on this order")


def _hang() -> None:
    hung_up = threading.Event()
    with on_cancel(hung_up.set):  # as a client closes its socket
        hung_up.wait(HANGING_SECONDS)
