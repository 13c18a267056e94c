"""What goes wrong during a campaign: workers are killed and paused, machines die, servers are restarted."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from onceward.testing.servers import Server
from tests.campaign import shop
from tests.support.own_postgres import OwnPostgres


class Victim(Protocol):
    """What can be attacked."""

    redis: Server | None
    postgres: OwnPostgres | None

    def workers(self) -> list[int]: ...

    def has_ended(self) -> bool: ...

    def kill_all(self) -> None:
        """Kill processes at once, as when a machine dies."""

    def restart(self) -> None:
        """Start again what `kill_all` killed."""


class Trouble:
    """A list of acts, in random order, until all are done."""

    def __init__(
        self, field: Victim, chance: random.Random, *, kills: int, pauses: int, restarts: int
    ) -> None:
        self._field = field
        self._chance = chance
        self.done: Counter[str] = Counter()
        self._paused: set[int] = set()
        dead_machines = kills // 10
        self._acts: list[Callable[[], None]] = [
            *[self._kill_worker] * (kills - dead_machines),
            *[self._kill_machine] * dead_machines,
            *[self._pause_worker] * pauses,
        ]
        if field.redis is not None:
            self._acts += [self._restart_redis] * restarts
        if field.postgres is not None:
            self._acts += [self._restart_postgres] * restarts
        chance.shuffle(self._acts)

    def make(self, seconds: float) -> None:
        """Spread all acts over some seconds. Returns when the last one is over."""
        pause = seconds / max(len(self._acts), 1)
        for act in self._acts:
            time.sleep(pause * self._chance.uniform(0.5, 1.5))
            if self._field.has_ended():
                raise RuntimeError("onceward run has ended by itself; see its log")
            act()
        while self._paused:
            time.sleep(0.1)

    def _kill_worker(self) -> None:
        worker = self._choose()
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
            self.done["kills"] += 1

    def _kill_machine(self) -> None:
        self._field.kill_all()
        self._field.restart()
        self.done["kills"] += 1

    def _pause_worker(self) -> None:
        """Freeze a worker, mostly for longer than its leases: it wakes up as a zombie."""
        worker = self._choose()
        seconds = self._chance.uniform(0.5, 2.5) * shop.LEASE
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGSTOP)
            self._paused.add(worker)
            self.done["pauses"] += 1
            threading.Timer(seconds, self._wake, [worker]).start()

    def _wake(self, worker: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
        self._paused.discard(worker)

    def _restart_redis(self) -> None:
        assert self._field.redis is not None
        self._field.redis.kill()
        time.sleep(self._chance.uniform(0, 1))
        self._field.redis.start()
        self.done["restarts"] += 1

    def _restart_postgres(self) -> None:
        assert self._field.postgres is not None
        self._field.postgres.control("stop", "-m", "immediate")
        time.sleep(self._chance.uniform(0, 1))
        self._field.postgres.start()
        self.done["restarts"] += 1

    def _choose(self) -> int:
        while not (workers := [each for each in self._field.workers() if each not in self._paused]):
            time.sleep(0.05)
        return self._chance.choice(workers)
