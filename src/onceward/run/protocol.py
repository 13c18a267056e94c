"""What supervisor and workers tell each other, as lines of JSON, and with which codes a worker ends.

Moments are of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

ENDED = 0
MISUSED = 2
RECYCLED = 75
"""A thread was stuck: the rest of the work is done, and another process shall go on."""
CUT_OFF = 76
"""Some work was left to its lease."""
UNREACHABLE = 77
"""A run that is to end by itself has waited long enough for a source or a database."""

DRAIN = b"drain\n"
HURRY = b"hurry\n"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is to do."""

    target: str
    """The app, as module:name."""
    number: int
    drain: bool
    """End when the sources are empty."""
    grace: float
    log_format: str
    log_level: str
    env: str | None
    concurrency: int | None
    """These two, if given, win over what the app says."""


class WorkerState(StrEnum):
    STARTING = "starting"
    CONSUMING = "consuming"
    """Its source has answered."""
    WAITING = "waiting"
    """Source or database are away; it asks again after a while."""
    STOPPING = "stopping"
    ENDED = "ended"


class ConsumerStatus(msgspec.Struct, kw_only=True):
    """What one consumer of one worker does."""

    name: str
    state: WorkerState
    succeeded: int
    failed: int
    returned: int
    """Not started, or postponed: back with the source."""
    in_flight: int
    """Fetched, and the source not told of the end."""
    oldest_since: float | None
    """When the oldest of them was fetched."""
    asking_since: float | None
    """When a fetch began that has not answered."""
    progress_at: float
    """When something was last fetched or settled."""
    stuck: int
    problem: str | None
    """Why it waits."""

    def standing_still_since(self) -> float | None:
        """It has work, or is owed an answer, and nothing has moved since then. None for one that is idle."""
        return self.progress_at if self.in_flight else self.asking_since


class WorkerStatus(msgspec.Struct, kw_only=True):
    """What a worker process says of itself."""

    consumers: list[ConsumerStatus]
    refused: str | None = None
    """Why it cannot run at all."""
