"""Ids in flight: two transactions with one id never run at once in one task instance."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from onceward.task.lifecycle import Life
from onceward.transaction import Transaction

CallAgain = Callable[[Transaction], None]


class IdsInFlight:
    """Who holds which id, and who waits for it.

    Taking an id nobody else wants is `holders.setdefault(id, life) is life`, one atomic operation, done by
    the slots themselves; this class is for the rare id that is wanted twice.
    """

    def __init__(self) -> None:
        self.holders: dict[str, Life] = {}
        self.waiting: dict[str, deque[tuple[CallAgain, Transaction]]] = {}
        self._lock = threading.Lock()

    def wait(self, life: Life, call_again: CallAgain) -> bool:
        """Another life holds the id: queue up. `call_again` gets the transaction once that one has ended.

        True if there is nothing to wait for: the other has left meanwhile, and the id is ours; or it is
        stuck, nobody knows until when, and `life` may go on, marked as blocked.
        """
        key = life.transaction.id
        with self._lock:
            # First join the queue, then look again: a holder that leaves now either sees us or lets us in.
            queue = self.waiting.setdefault(key, deque())
            queue.append((call_again, life.transaction))
            holder = self.holders.setdefault(key, life)
            if holder is not life and not holder.stuck:
                return False
            life.blocked = holder.stuck
            queue.pop()
            if not queue:
                del self.waiting[key]
            return True

    def release(self, life: Life) -> None:
        """Give the id back and let the next in, in order of arrival. No-op for one that never held it."""
        key = life.transaction.id
        if self.holders.get(key) is life:
            del self.holders[key]
            if self.waiting:
                self._call(key, all_of_them=False)

    def block(self, life: Life) -> None:
        """`life` is stuck: whoever waits for its id shall look again, and find itself blocked."""
        self._call(life.transaction.id, all_of_them=True)

    def _call(self, key: str, *, all_of_them: bool) -> None:
        with self._lock:
            queue = self.waiting.get(key)
            called = [] if queue is None else list(queue) if all_of_them else [queue.popleft()]
            if queue is not None and (all_of_them or not queue):
                del self.waiting[key]
        for call_again, transaction in called:
            call_again(transaction)
