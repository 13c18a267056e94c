"""What holds the consumers of an app, as far as this process knows: shared by all of them, in threads and asyncio.

An outage holds from the moment it is found here. It is written down, and what other processes wrote is read, when a
consumer next asks its source.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from math import inf

import msgspec

from onceward._time import wall
from onceward.durations import format_seconds
from onceward.failures.states import Down, FleetState, Identity, Paused
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.failures"))

CONSUMER = "consumer:"
DEPENDENCY = "dependency:"


def shown(subject: str) -> str:
    """The name of what is down, for people."""
    name = subject.partition(":")[2]
    is_scope = subject.startswith(CONSUMER) and name.startswith("[")  # not as earlier versions wrote it
    return str(json.loads(name)[-1]) if is_scope else name


def subjects_of(app: str, consumer: Identity, depends_on: Sequence[str]) -> tuple[str, ...]:
    """What may be down for a consumer: first the consumer alone, then what it depends on. Apps that share a database
    share what they depend on, but may have different consumers of the same name."""
    alone = json.dumps([app, *consumer])
    return (f"{CONSUMER}{alone}", *(f"{DEPENDENCY}{name}" for name in depends_on))


class NewOutage(msgspec.Struct):
    """An outage that this process has found."""

    subject: str
    reason: str
    probe_in: float
    since: float = msgspec.field(default_factory=wall)


class Board:
    def __init__(self) -> None:
        self.active = False
        """Whether anything at all is down or paused."""
        self.down: dict[str, Down] = {}
        self.paused: dict[Identity, Paused] = {}
        self.read_at = -inf
        """When the records were last read, by the clock of the consumers."""
        self.found: list[NewOutage] = []
        """Outages that are not written down yet."""
        self.streaks: dict[str, dict[str, None]] = {}
        """The messages that failed in a row, by what seems to be down."""
        self._state = FleetState()
        self._over: set[str] = set()
        """Outages that ended here, and may still be in the records."""
        self._subjects: set[str] = set()
        self._consumers: set[Identity] = set()
        self._lock = threading.Lock()
        self._trouble = False

    def watch(self, consumer: Identity, subjects: Sequence[str]) -> None:
        """Log what concerns this consumer."""
        with self._lock:
            self._consumers.add(consumer)
            self._subjects.update(subjects)

    # ── outages ─────────────────────────────────────────────────────────────────────────────────────────

    def count(self, subject: str, message: str, after: int) -> bool:
        """Count a message that failed. Returns whether so many different ones in a row make an outage."""
        with self._lock:
            streak = self.streaks.setdefault(subject, {})
            streak[message] = None
            if len(streak) < after:
                return False
            del self.streaks[subject]
            return True

    def break_streaks(self, subjects: Sequence[str]) -> None:
        """A message succeeded."""
        with self._lock:
            for subject in subjects:
                self.streaks.pop(subject, None)

    def find(self, found: NewOutage) -> None:
        """An outage begins now."""
        with self._lock:
            if found.subject in self.down:
                return
            self.found.append(found)
            self._over.discard(found.subject)
            changes = self._arrange()
        self._log(changes)

    def end(self, subjects: Sequence[str]) -> None:
        """These outages are over, whatever the records say until `note` is called with them."""
        with self._lock:
            self._over.update(subjects)
            changes = self._arrange()
        self._log(changes)

    def note(
        self, state: FleetState, now: float, found: Sequence[NewOutage] = (), ended: Sequence[str] = ()
    ) -> None:
        """Take over what the records say, now that these beginnings and ends are in them."""
        with self._lock:
            self.read_at = now
            self._state = state
            self._over.difference_update(ended)
            self.found = [each for each in self.found if each not in found]
            self._trouble = False
            changes = self._arrange()
        self._log(changes)

    def note_trouble(self, error: Exception) -> None:
        """The records cannot be reached: what is known stays as it is."""
        if not self._trouble:
            self._trouble = True
            _log.warning(
                "cannot read what holds consumers; what is known of outages and pauses stays as it is: %s",
                error,
            )

    def _arrange(self) -> list[str]:
        """Put together what holds now. Returns what to log about it."""
        outages, pauses = self.down, self.paused
        here = {each.subject: Down(since=each.since, reason=each.reason, due_in=inf) for each in self.found}
        known = {**here, **self._state.down}
        self.down = {name: each for name, each in known.items() if name not in self._over}
        self.paused = dict(self._state.paused)
        self.active = bool(self.down or self.paused)
        began = self._subjects & (self.down.keys() - outages.keys())
        ended = self._subjects & (outages.keys() - self.down.keys())
        paused = [each for each in self._consumers if self.paused.get(each) not in (None, pauses.get(each))]
        resumed = self._consumers & (pauses.keys() - self.paused.keys())
        return [
            *(_beginning(name, self.down[name]) for name in sorted(began)),
            *(_ending(name, outages[name]) for name in sorted(ended)),
            *(describe_pause(self.paused[each]) for each in sorted(paused)),
            *(f"{name} is resumed" for _, name in sorted(resumed)),
        ]

    def _log(self, changes: Sequence[str]) -> None:
        for line in changes:
            _log.warning("%s", line)


def _beginning(subject: str, down: Down) -> str:
    return (
        f"{shown(subject)} is down: {down.reason}; consumers that need it fetch nothing but one message for each "
        "probe, and nothing is counted against a message"
    )


def _ending(subject: str, down: Down) -> str:
    lasted = format_seconds(max(wall() - down.since, 0.0))
    return f"{shown(subject)} is up again after {lasted}; consumers that need it go on at full rate"


class Hold(msgspec.Struct, frozen=True):
    """What holds a consumer now."""

    why: str | None
    """In words; None if nothing does."""
    paused: bool
    down_since: float | None
    """Seconds since 1970; None if all it needs is up."""


def hold_of(board: Board, app: str, consumer: Identity, depends_on: Sequence[str]) -> Hold:
    """What holds a consumer of an app, as this process knows it."""
    pause = board.paused.get(consumer)
    found = {each: board.down.get(each) for each in subjects_of(app, consumer, depends_on)}
    down = {subject: each for subject, each in found.items() if each is not None}
    lines = [] if pause is None else [describe_pause(pause).removeprefix(f"{pause.name} is ")]
    lines += [describe_outage(subject, each) for subject, each in down.items()]
    since = min((each.since for each in down.values()), default=None)
    return Hold("; ".join(lines) or None, pause is not None, since)


def describe_pause(pause: Paused) -> str:
    return f"{pause.name} is paused {describe_pauser(pause)}"


def describe_pauser(pause: Paused) -> str:
    """Who paused it, since when and why."""
    why = f": {pause.reason}" if pause.reason else ""
    return f"by {pause.operator} since {_clock_time(pause.paused_at)}{why}"


def describe_outage(subject: str, down: Down) -> str:
    return f"waiting for {shown(subject)}, which is down since {_clock_time(down.since)}: {down.reason}"


def _clock_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
