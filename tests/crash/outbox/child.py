"""A process that sends or relays, and kills itself at a named point.

    python -m tests.crash.outbox.child DATABASE SINK POINT

`committed`: it sends ten messages and dies after its commit. `claimed`, `dispatched`: it relays, and dies after its
first claim, or after its first dispatch and before that is recorded. `never`: it relays until nothing is left.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, NoReturn

from onceward import Onceward
from onceward.connectors.urls import Address
from onceward.outbox.claims import OutboxRows
from onceward.outbox.relay import Relay
from onceward.outbox.sinks import Sinks

LEASE = 1.0
PATIENCE = 3 * LEASE
"""Seconds without a message until nothing is left: the claims of a killed relay end with their lease."""


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def send(app: Onceward, sink: str) -> None:
    with app.create_engine().begin() as connection:
        for number in range(10):
            app.outbox(connection).send(sink, number, key=str(number % 2))


def relay(app: Onceward, point: str) -> None:
    if point == "claimed":
        Sinks.dispatch = die  # type: ignore[method-assign]
    elif point == "dispatched":
        OutboxRows.end = die  # type: ignore[method-assign]
    with Relay(app.create_engine(), lambda url: Address(url, sink=True), lease=LEASE) as source:
        last = time.monotonic()
        while time.monotonic() < last + PATIENCE:
            for each in source.fetch_transactions(16):
                source.publish(each)
                last = time.monotonic()
            source.await_transactions(0.5)


if __name__ == "__main__":
    database, sink, point = sys.argv[1:]
    shop = Onceward("shop", database=database)
    if point == "committed":
        send(shop, sink)
        die()
    relay(shop, point)
