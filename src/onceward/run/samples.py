"""What waits in the sources and the database of an app, sampled in the background for `/metrics` and the console.

Each source has a thread of its own, so one that does not answer keeps neither the others nor a page waiting. A sample
that took long is taken less often: sampling uses at most a twentieth of the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from onceward.app.app import RELAY, Consumer, Onceward
from onceward.app.build import consumer_id
from onceward.connectors.reports import ServerUnreachable, SourceBacklog
from onceward.errors import OncewardError
from onceward.inspection.backlog import DatabaseBacklog, database_backlog
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from onceward.outbox.backlog import OutboxBacklog

_log = OwnLogger(logging.getLogger("onceward.run"))

SHARE = 20
"""A sample is followed by a pause of so many times what it took, at least."""
FORGOTTEN_AFTER = 300.0
"""Seconds after which a number is no longer shown: it says nothing about now."""

T = TypeVar("T")


class Reading(NamedTuple, Generic[T]):
    """The last answer, and whether there was one to the last question."""

    value: T | None = None
    at: float | None = None
    """When it was read, by `time.monotonic`; None if there was never an answer."""
    problem: str | None = None
    """Why the last question had no answer; None if it had one."""

    @property
    def age(self) -> float | None:
        return None if self.at is None else max(time.monotonic() - self.at, 0.0)

    @property
    def current(self) -> T | None:
        """The value, unless it is too old to say anything."""
        return None if self.age is None or self.age > FORGOTTEN_AFTER else self.value


class Samples:
    """Readings of the sources, by the name of the consumer, and of the database. Start it once."""

    def __init__(self, app: Onceward, consumers: Iterable[Consumer], every: float) -> None:
        self.consumers = {each.name: each for each in consumers if each.name != RELAY}
        self.sources: dict[str, Reading[SourceBacklog]] = dict.fromkeys(self.consumers, Reading())
        self.database: Reading[DatabaseBacklog] = Reading()
        self._app = app
        self._every = every
        self._stopped = threading.Event()
        self._one_at_a_time = threading.Lock()
        """For the database: an answer must not be replaced by one to an earlier question."""

    def start(self) -> None:
        for name, consumer in self.consumers.items():
            if not consumer.source.in_process:
                self._repeat(partial(self._look_at_source, name))
        if self._app.settings.database is not None:
            self._repeat(self._look_at_database)

    def stop(self) -> None:
        """Take no more samples. One that is being taken ends by itself, in a daemon thread."""
        self._stopped.set()

    def refresh_database(self, patience: float) -> None:
        """Ask the database again, because something was changed; wait for its answer for so many seconds at most."""
        asking = threading.Thread(target=self._look_at_database, name="onceward-samples", daemon=True)
        asking.start()
        asking.join(patience)

    def dead(self, consumer: str) -> dict[str, int]:
        """Its open dead letters by category; empty if there are none, or they are unknown."""
        found, name = self.database.current, self._id(consumer)
        return (
            {category: count for (of, category), count in found.dead.items() if of == name} if found else {}
        )

    def parked(self, consumer: str) -> int | None:
        found = self.database.current
        return None if found is None else found.parked.get(self._id(consumer), 0)

    def held_keys(self, consumer: str) -> int:
        """How many of its keys dead letters hold."""
        found = self.database.current
        return 0 if found is None else found.held_keys.get(self._id(consumer), 0)

    @property
    def outbox(self) -> OutboxBacklog | None:
        """What waits in it; None if that is unknown, or there is no outbox."""
        found = self.database.current
        return None if found is None else found.outbox

    def _id(self, name: str) -> str:
        return consumer_id(self.consumers[name]) if name in self.consumers else name

    def _look_at_source(self, name: str) -> None:
        reading = _read(self.consumers[name].source.backlog)
        self.sources[name] = reading._replace(**self._before(self.sources[name], reading))

    def _look_at_database(self) -> None:
        database = self._app.settings.database
        if database is None:
            return
        with self._one_at_a_time:
            reading = _read(lambda: database_backlog(database))
            self.database = reading._replace(**self._before(self.database, reading))

    @staticmethod
    def _before(known: Reading[Any], reading: Reading[Any]) -> dict[str, Any]:
        """An unanswered question leaves the last answer, which grows old."""
        return {"value": known.value, "at": known.at} if reading.at is None else {}

    def _repeat(self, look: Callable[[], None]) -> None:
        def work() -> None:
            while not self._stopped.is_set():
                began = time.monotonic()
                look()
                took = time.monotonic() - began
                self._stopped.wait(max(self._every, took * SHARE))

        threading.Thread(target=work, name="onceward-samples", daemon=True).start()


def _read(ask: Callable[[], Any]) -> Reading[Any]:
    try:
        return Reading(ask(), time.monotonic())
    except (ServerUnreachable, OncewardError) as error:
        return Reading(problem=str(error))
    except Exception as error:  # noqa: BLE001  a connector's mistake must not end the samples of a run
        _log.warning("a sample for /metrics failed", exc_info=True)
        return Reading(problem=f"{type(error).__name__}: {error}")
