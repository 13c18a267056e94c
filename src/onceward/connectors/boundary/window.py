"""The facts beyond a consumer's cursor, as a queue with leases in this process's memory.

confirmed │ done  done  in flight  done  dead │ not fetched yet
          └── the cursor may move to the end of the second "done", no further
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile

import msgspec

from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.leases import LeasingConnector, seconds_until_due
from onceward.connectors.memory import MemoryLeaseStore


class FactWindow(MemoryLeaseStore):
    """Facts by offset. Knows up to which offset all of them are done."""

    def __init__(self) -> None:
        super().__init__()
        self._beyond: deque[int] = deque()
        self.last = 0
        """The offset of the last fact ever added."""

    def __len__(self) -> int:
        """Count the facts held beyond the cursor, done or not."""
        return len(self._beyond)

    def add(self, facts: Iterable[tuple[int, bytes]], now: float) -> None:
        """Add those that were never added before."""
        with self._lock:
            new = [each for each in facts if each[0] > self.last]
            self.put(new, now)
            for offset, _ in new:
                self._beyond.append(offset)
                self.last = offset

    def finished(self) -> int | None:
        """Return the offset up to which everything is done; None if nothing is."""
        with self._lock:
            dead = {each.key[0] for each in self._dead}
            done = takewhile(lambda offset: offset not in self._messages and offset not in dead, self._beyond)
            return max(done, default=None)

    def forget_up_to(self, offset: int) -> None:
        """Remove facts that the cursor has passed: moved by us, or by another connector with our name."""
        with self._lock:
            while self._beyond and self._beyond[0] <= offset:
                self._messages.pop(self._beyond.popleft(), None)
            self._dead = [each for each in self._dead if each.key[0] > offset]

    def obstacle(self) -> int | None:
        """Return the first fact that is not done, unless it is in flight: it failed, and is delayed or dead."""
        with self._lock:
            dead = {each.key[0] for each in self._dead}
            for offset in self._beyond:
                message = self._messages.get(offset)
                if message is not None:
                    return offset if message.token is None else None
                if offset in dead:
                    return offset
        return None


class WindowQueue(LeasingConnector):
    """Delivers the facts in the window. Until `bury_failures`, it redelivers every failure, forever."""

    def __init__(self, rules: LeaseRules, clock: Callable[[], float] | None) -> None:
        self.window = FactWindow()
        super().__init__(self.window, rules, clock)
        self._rules_for_burials = rules
        self.rules = msgspec.structs.replace(rules, max_deliveries=sys.maxsize, on_failure="redeliver")

    def add(self, facts: Iterable[tuple[int, bytes]]) -> None:
        self.window.add(facts, self._clock())

    def ready(self, most: int) -> int:
        """Count the facts that could be delivered now, up to `most`."""
        with self.window.transaction(0.0):
            return len(self.window.available(self._now(), most))

    def seconds_until_due(self) -> float:
        """How long until a fact that is held can be delivered: 0 if one can be, `inf` if none will."""
        return seconds_until_due(self.window, self._now)

    def bury_failures(self) -> None:
        """From now on facts that fail permanently become dead letters: another store will keep them."""
        self.rules = self._rules_for_burials
