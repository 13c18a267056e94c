"""What is in flight in a worker, for operators: which message, at which step, and where its code is if it is slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from onceward.limits.limit import KeyProblem
from onceward.run.protocol import Flight

if TYPE_CHECKING:
    from onceward.app.app import Consumer
    from onceward.task.deadlines import RunningAttempt
    from onceward.transaction import Transaction

LISTED: Final = 10
"""Messages in flight that a status names: first those whose code runs; those that are stuck come in addition, as
many."""
LONG: Final = 5.0
"""Seconds in flight after which a status says where the code is."""
STACKS: Final = 5
"""Messages for which it does."""


Seen = dict[tuple[str, str, int], float]
"""When each attempt that runs was first seen, by transaction, step and number: to note it in the engine would cost
every message something."""


def flights_of(
    consumer: Consumer,
    task: Any,
    in_flight: Sequence[tuple[Transaction, float]],
    now: float,
    seen: Seen | None = None,
) -> list[Flight]:
    """Describe what is in flight, given with the time at which each was fetched: first those whose code runs, which
    others of their batch may be waiting for, then the oldest. `seen` is what the last call has left there."""
    seen = {} if seen is None else seen
    if not in_flight or task is None:
        seen.clear()
        return []
    attempts = {each.transaction_id: each for each in sorted(task.attempts(), key=lambda one: one.stuck)}
    _look(seen, attempts.values(), now)
    begun = task.begun()
    running_first = sorted(in_flight, key=lambda each: each[0].id not in attempts)
    stuck = [each for each in running_first[LISTED:] if (one := attempts.get(each[0].id)) and one.stuck]
    found: list[Flight] = []
    for transaction, since in (*running_first[:LISTED], *stuck[:LISTED]):
        attempt = attempts.get(transaction.id)
        step = begun.get(transaction.id) if attempt is None else attempt.step
        flight = Flight(id=transaction.id, since=since, step=step or None, key=key_of(consumer, transaction))
        if attempt is not None:
            flight.attempt, flight.stuck = attempt.number + 1, attempt.stuck
            flight.attempt_since = seen.get(_key(attempt))
            if attempt.stuck or now - since >= LONG:
                flight.stack = attempt.stack() if sum(each.stack != "" for each in found) < STACKS else ""
        found.append(flight)
    return found


def _look(seen: Seen, attempts: Iterable[RunningAttempt], now: float) -> None:
    running = {key: seen.get(key, now) for key in map(_key, attempts)}
    seen.clear()
    seen.update(running)


def _key(attempt: RunningAttempt) -> tuple[str, str, int]:
    return attempt.transaction_id, attempt.step, attempt.number


def key_of(consumer: Consumer, transaction: Transaction) -> str | None:
    """The key by which its consumer keeps order, or is limited; None if it has none."""
    if consumer.order is not None:
        return consumer.order.key_of(transaction)
    keys = consumer.limit_keys
    if keys is not None and keys.keyed:
        with suppress(KeyProblem):
            return keys.key_of(transaction.payload)
    return None
