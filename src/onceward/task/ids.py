"""Ids in flight: two transactions with one id never run at once in one task instance."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from onceward.task.work import Life


class Waiting(Protocol):
    """Where lives wait: the slots of one call."""

    def call_up(self, life: Life) -> None:
        """It is this life's turn."""
        ...


class IdsInFlight:
    """Who holds which id, and who waits for it, in order of arrival.

    Taking an id nobody else wants is `holders.setdefault(id, life) is life`, one atomic operation, done by
    the slots themselves; the lock is for the rare id that is wanted twice.
    """

    def __init__(self) -> None:
        self.holders: dict[str, Life] = {}
        self._waiting: dict[str, deque[tuple[Waiting, Life]]] = {}
        self._lock = threading.Lock()

    def wait(self, life: Life, place: Waiting) -> bool:
        """Another life holds the id: stand in line, and be called up when it is this one's turn.

        True if there is nothing to wait for: the other has left meanwhile, and the id is ours; or it is
        stuck, nobody knows until when, and `life` may go on, marked as blocked.
        """
        key = life.transaction.id
        with self._lock:
            # First stand in line, then look again: a holder that leaves now either sees us or lets us in.
            line = self._waiting.setdefault(key, deque())
            line.append((place, life))
            holder = self.holders.setdefault(key, life)
            if holder is not life and not holder.stuck:
                return False
            life.blocked = holder.stuck
            line.pop()
            if not line:
                del self._waiting[key]
            return True

    def release(self, life: Life) -> None:
        """Give the id back, to the next in line if there is one. No-op for a life that never held it."""
        key = life.transaction.id
        if self.holders.get(key) is not life:
            return
        if not self._waiting:
            del self.holders[key]
            if not self._waiting:
                return
        with self._lock:
            line = self._waiting.get(key)
            if line is None:
                if self.holders.get(key) is life:
                    del self.holders[key]
                return
            place, successor = line[0]
            if self.holders.get(key) is life:
                self.holders[key] = successor
            elif self.holders.setdefault(key, successor) is not successor:
                return  # a newcomer was faster; it will call up the line when it leaves
            line.popleft()
            if not line:
                del self._waiting[key]
        place.call_up(successor)

    def block(self, life: Life) -> None:
        """`life` is stuck: whoever waits for its id goes on as blocked."""
        with self._lock:
            line = self._waiting.pop(life.transaction.id, deque())
        for place, waiting in line:
            waiting.blocked = True
            place.call_up(waiting)

    def withdraw(self, place: Waiting) -> list[Life]:
        """Take all who wait there out of line."""
        withdrawn: list[Life] = []
        with self._lock:
            for key, line in list(self._waiting.items()):
                withdrawn += [life for where, life in line if where is place]
                stay = deque((where, life) for where, life in line if where is not place)
                if stay:
                    self._waiting[key] = stay
                else:
                    del self._waiting[key]
        return withdrawn
