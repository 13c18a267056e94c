"""The targets that a relay cannot reach: since when, why, and when it tries each of them again. From any thread."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from onceward.backoff import Backoff
from onceward.outbox.targets import shown
from onceward.task.lifecycle import text_of
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.redaction import redact

_log = OwnLogger(logging.getLogger("onceward.outbox"))

PAUSE = Backoff(0.25, cap=15.0, jitter=0.2)
"""How long messages wait for a sink that cannot be reached, until one of them is tried."""


class Away(NamedTuple):
    """A target that cannot be reached."""

    until: float
    """When it is tried next, by `time.monotonic`."""
    failures: int
    """How often it failed in a row."""
    since: float
    """In seconds since 1970."""
    why: str


class SinkOutages:
    """Those of one relay."""

    def __init__(self) -> None:
        self._away: dict[str, Away] = {}
        self._lock = threading.Lock()

    def all(self) -> dict[str, Away]:
        with self._lock:
            return dict(self._away)

    def pauses(self) -> dict[str, float]:
        """The targets that are not to be tried now, and the seconds until they are."""
        now = time.monotonic()
        return {target: away.until - now for target, away in self.all().items() if away.until > now}

    def begin(self, target: str, error: Exception) -> None:
        why = redact(text_of(error))
        with self._lock:
            before = self._away.get(target)
            failures, since = (0, time.time()) if before is None else (before.failures, before.since)
            self._away[target] = Away(time.monotonic() + PAUSE.delay(failures), failures + 1, since, why)
        if before is None:
            _log.warning("%s cannot be reached; its messages wait in the outbox: %s", shown(target), why)

    def end(self, target: str) -> None:
        with self._lock:
            was_away = self._away.pop(target, None)
        if was_away is not None:
            _log.info("%s can be reached again", shown(target))
