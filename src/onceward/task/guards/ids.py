"""At most one transaction of an id in flight: the others wait for their turn."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from onceward.task.work import Life


class Waiting(Protocol):
    """Where lives wait for their id: the slots of one call."""

    def call_up(self, life: Life) -> None:
        """Start this life: it is its turn."""
        ...


class IdsInFlight:
    """The life that holds each id, and the lives waiting for it, in order of arrival.

    Two transactions with the same id never run at once in one task instance. Slots take a free id with
    `holders.setdefault(id, life) is life`, one atomic operation; the lock is for the rare id that is already held.
    """

    def __init__(self) -> None:
        self.holders: dict[str, Life] = {}
        self.waiting: dict[str, deque[tuple[Waiting, Life]]] = {}
        self._lock = threading.Lock()

    def wait(self, life: Life, place: Waiting) -> bool:
        """Queue for an id that another life holds; `place.call_up` follows when it is this life's turn.

        Returns True if there is no need to wait: the holder has left meanwhile and the id is ours, or the holder is
        stuck and `life` goes on, marked as blocked.
        """
        key = life.transaction.id
        with self._lock:
            # Queue first, then check again: a holder that leaves now either sees us or frees the id.
            line = self.waiting.setdefault(key, deque())
            line.append((place, life))
            holder = self.holders.setdefault(key, life)
            if holder is not life and not holder.stuck:
                return False
            life.blocked = holder.stuck
            line.pop()
            if not line:
                del self.waiting[key]
            return True

    def release(self, life: Life) -> None:
        """Release the id, to the next in line if there is one. No-op for a life that does not hold it."""
        key = life.transaction.id
        if self.holders.get(key) is not life:
            return
        if not self.waiting:
            del self.holders[key]
            if not self.waiting:
                return
        self.pass_on(life)

    def pass_on(self, life: Life) -> None:
        """Give the id that `life` has, or had until now, to the next in line."""
        key = life.transaction.id
        with self._lock:
            line = self.waiting.get(key)
            if line is None:
                if self.holders.get(key) is life:
                    del self.holders[key]
                return
            place, successor = line[0]
            if self.holders.get(key) is life:
                self.holders[key] = successor
            elif self.holders.setdefault(key, successor) is not successor:
                return  # a newcomer was faster; it calls up the next when it leaves
            line.popleft()
            if not line:
                del self.waiting[key]
        place.call_up(successor)

    def block(self, life: Life) -> None:
        """`life` is stuck: lives waiting for its id go on as blocked."""
        with self._lock:
            line = self.waiting.pop(life.transaction.id, deque())
        for place, waiting in line:
            waiting.blocked = True
            place.call_up(waiting)

    def withdraw(self, place: Waiting) -> list[Life]:
        """Remove the lives of `place` from the queue, and return them."""
        withdrawn: list[Life] = []
        with self._lock:
            for key, line in list(self.waiting.items()):
                withdrawn += [life for where, life in line if where is place]
                stay = deque((where, life) for where, life in line if where is not place)
                if stay:
                    self.waiting[key] = stay
                else:
                    del self.waiting[key]
        return withdrawn
