"""Suspects run alone, so an event that may be killing its processes takes no other event with it.

All other events run together. A suspect waits until no event is running, and other events wait until it has finished.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from time import monotonic

from onceward.task.cancellation import cancel_requested, on_cancel, raise_if_cancelled

PATIENCE = 30.0
"""Seconds a suspect waits for the others. One of them may be stuck; the suspect is then retried later."""


class Turns:
    """How many events are inside, and how many wait to be alone."""

    def __init__(self) -> None:
        self.inside = 0
        self.alone = False
        self.waiting = 0

    def may_enter(self, alone: bool) -> bool:
        if self.alone:
            return False
        return self.inside == 0 if alone else self.waiting == 0

    def enter(self, alone: bool) -> None:
        self.inside += 1
        self.alone = alone

    def leave(self) -> None:
        self.inside -= 1
        self.alone = False


class BlockingGate:
    def __init__(self) -> None:
        self.turns = Turns()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    async def enter(self, alone: bool) -> bool:
        """Wait for permission to run. Returns False if it took longer than `PATIENCE`."""
        turns = self.turns
        with self._lock:
            if not (alone or turns.alone or turns.waiting):
                turns.inside += 1  # the common case
                return True
            if turns.may_enter(alone):
                turns.enter(alone)
                return True
        with on_cancel(self._wake):
            return self._wait(alone)

    def _wait(self, alone: bool) -> bool:
        turns = self.turns
        with self._lock:
            turns.waiting += alone
            try:
                self._changed.wait_for(lambda: turns.may_enter(alone) or cancel_requested(), PATIENCE)
                raise_if_cancelled()
                if not turns.may_enter(alone):
                    return False
                turns.enter(alone)
                return True
            finally:
                turns.waiting -= alone
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def leave(self) -> None:
        with self._lock:
            self.turns.leave()
            if self.turns.waiting or self.turns.inside == 0:
                self._changed.notify_all()


class AsyncGate:
    def __init__(self) -> None:
        self.turns = Turns()
        self._sleepers: deque[asyncio.Future[None]] = deque()

    async def enter(self, alone: bool) -> bool:
        turns = self.turns
        if turns.may_enter(alone):
            turns.enter(alone)
            return True
        turns.waiting += alone
        until = monotonic() + PATIENCE
        try:
            while not turns.may_enter(alone):
                changed = asyncio.get_running_loop().create_future()
                self._sleepers.append(changed)
                try:
                    await asyncio.wait_for(changed, until - monotonic())
                except TimeoutError:
                    return False
            turns.enter(alone)
            return True
        finally:
            turns.waiting -= alone
            self._wake()

    def leave(self) -> None:
        self.turns.leave()
        self._wake()

    def _wake(self) -> None:
        while self._sleepers:
            changed = self._sleepers.popleft()
            if not changed.done():
                changed.set_result(None)
