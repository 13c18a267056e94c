"""What a connector reports about a source: facts for `onceward explain`, counts for `onceward balance`, its backlog for
`/metrics`.

Unknown is unknown: a connector leaves out what it cannot determine, and no command guesses.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import msgspec

from onceward._text import quantity
from onceward.errors import OncewardError

ANSWER_SECONDS = 5.0
"""How long an inspected server may take to answer."""
CHECK_SERVER = "check that it is running, and that its URL is right"


class ServerUnreachable(OncewardError):
    """A server does not answer, or refuses to. The message names it, and says what to check, without a password."""


# ── facts ───────────────────────────────────────────────────────────────────────────────────────────────


class Survives(IntEnum):
    """The worst that a confirmed message survives."""

    NOTHING = 0
    PROCESS_CRASH = 1
    """A crash of any process, the server's included."""
    MACHINE_CRASH = 2
    """A power cut as well."""


class Durability(msgspec.Struct, frozen=True):
    """How durable a message is once `dispatch_transactions` has returned."""

    survives: Survives | None
    """None if it could not be determined."""
    why: str
    advice: str = ""
    """The change that would make it stronger."""
    label: str = ""
    """A few words for the headline."""


class Hazard(msgspec.Struct, frozen=True):
    """Something that weakens the source however durable it is: a limit, an eviction, a version."""

    why: str
    advice: str
    loses: bool = True
    """Whether messages may be lost. Otherwise effects may be repeated."""


class SourceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a source as configured now. The defaults mean unknown."""

    durability: Durability | None = None
    """None if it could not be determined."""
    redelivers: bool | None = None
    """Whether messages that a killed process had in flight are delivered again."""
    keeps_dead_letters: bool = True
    """Whether a message that keeps failing can be set aside in the source. Otherwise it blocks those after it."""
    hazards: tuple[Hazard, ...] = ()
    unreachable: tuple[str, ...] = ()
    """What could not be reached, and why."""


# ── counts ──────────────────────────────────────────────────────────────────────────────────────────────


class Seen(NamedTuple):
    """A message that is or was in the source."""

    tracking_id: str
    day: int
    """Of the event: the inbox purges records by it."""
    at: float = 0.0
    """When it was appended, in seconds since 1970; 0 if unknown."""
    digest: bytes = b""
    """SHA-256 of its bytes, the same as in its dead letter; empty if unknown, as for one that is done."""


class Forgotten(NamedTuple):
    """How many messages ended that the source no longer lists. They can be compared only by their number."""

    by_days: Mapping[tuple[int, int], int] = {}
    """Different ids, by the first and last day that their events may be of."""
    undated: int = 0
    """Messages of which not even the day is known."""
    copies: int = 0
    """Copies of the ids in `by_days`."""

    @property
    def total(self) -> int:
        return sum(self.by_days.values()) + self.undated + self.copies


class Messages(NamedTuple):
    """The messages themselves, oldest first."""

    done: list[Seen]
    """Acknowledged."""
    moved: list[Seen]
    """Dead letters that were moved to a database."""
    others: list[Seen]
    """Waiting, in flight, or dead letters that the source itself keeps."""
    forgotten: Forgotten = Forgotten()
    is_complete: bool = True
    """Whether `moved` has all that were moved. Otherwise some are among `done`, which may also begin with messages
    that were never delivered, because the consumer was set to start after them."""


class SourceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a source can count for one consumer. Unknown numbers are None.

    Without the database, everything that ended is `done`.
    """

    appended: int | None = None
    done: int | None = None
    """Acknowledged, and not a dead letter that the source knows of."""
    pending: int | None = None
    """Waiting, in flight, or delayed."""
    untouched: int = 0
    """How many of the pending were certainly never delivered, so they cannot have been applied."""
    dead: int | None = None
    """Dead letters that the source itself keeps."""
    moved: int | None = None
    """Dead letters that were moved to a database. None if the source does not count them; then they are among the
    done."""
    dropped: Mapping[str, int] = {}
    """By reason."""
    has_copies: bool = True
    """Whether the source may hold a message twice."""
    undelivered: int = 0
    """How many of the done may have been removed before this consumer could get them."""
    notes: Mapping[str, str] = {}
    """Why a number is unknown, or not what it seems, by the name of the number."""
    unknown: tuple[str, ...] = ()
    """Why the numbers do not show whether a message is missing."""
    missing: str | None = None
    """What does not exist, and what to check: it was never used, or its URL is mistyped."""
    messages: Messages | None = None
    """If the source can list them, each is looked up in the database; otherwise totals are compared."""


def explain_unlisted(ended: int, place: str) -> tuple[str, ...]:
    """Say that a source has counted so many more messages as ended than it lists."""
    if ended > 0:
        were = "was" if ended == 1 else "were"
        return (f"{quantity(ended, 'id')} of messages that ended {were} removed from {place}",)
    if ended < 0:
        return (
            f"{place} lists {quantity(-ended, 'message')} more than it has counted as ended: its counts were changed",
        )
    return ()


class SourceBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """What waits in a source for one consumer now. Cheap to read, so it is read every few seconds. None is unknown."""

    waiting: int | None = None
    """Due, and not delivered to anyone."""
    in_flight: int | None = None
    """Delivered, and not settled."""
    delayed: int | None = None
    """Due later."""
    dead: int | None = None
    """Dead letters that the source itself keeps."""
    oldest_age: float | None = None
    """Seconds since the oldest message that has not ended was appended; 0 if there is none."""
