"""Messages between supervisor and workers, as lines of JSON, and the exit codes of a worker.

Times are from `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

ENDED = 0
FAILED = 1
"""A crash, or any exit code that the worker has not announced: code of the app may exit with whatever it likes."""
MISUSED = 2
RECYCLED = 75
"""A thread was stuck: the rest of the work is done, and another process takes over."""
CUT_OFF = 76
"""Some work was cut off and left in flight."""
UNREACHABLE = 77
"""A run with `--drain` has waited long enough for a source or a database."""
UNDELIVERED = 78
"""A run with `--drain` is done, but messages of the outbox wait for targets that cannot be reached."""

DRAIN = b"drain\n"
HURRY = b"hurry\n"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a worker process."""

    target: str
    """The app, as module:name."""
    number: int
    drain: bool
    """Exit when the sources are empty."""
    grace: float
    log_format: str
    log_level: str
    env: str | None
    concurrency: int | None
    """These two, if given, win over the app's settings."""
    only: tuple[str, ...] = ()
    """The consumers to run; empty for all."""
    run_only: tuple[str, ...] = ()
    """The consumers of the whole run; empty for all."""
    pool_size: int | None = None
    """If given, wins over the app's settings."""
    owner: str | None = None
    """The name of the process for its leases: the supervisor ends them if the process dies."""


class WorkerState(StrEnum):
    STARTING = "starting"
    CONSUMING = "consuming"
    """Its source has answered."""
    WAITING = "waiting"
    """Source or database are unavailable; it will try again."""
    STOPPING = "stopping"
    ENDED = "ended"


class Flight(msgspec.Struct, kw_only=True):
    """A message in flight."""

    id: str
    since: float
    """When it was fetched."""
    step: str | None = None
    """None if it has not begun."""
    attempt: int = 0
    """From 1; 0 if none runs now."""
    attempt_since: float | None = None
    """Since when it runs, or a second later."""
    stuck: bool = False
    key: str | None = None
    """By which its consumer keeps order or is limited."""
    stack: str = ""
    """Where its code is, if it is stuck or takes long."""


class ConsumerStatus(msgspec.Struct, kw_only=True):
    """Status of one consumer of one worker."""

    name: str
    state: WorkerState
    succeeded: int
    failed: int
    returned: int
    """Not started or postponed, and given back to the source."""
    in_flight: int
    """Fetched and not settled."""
    oldest_since: float | None
    """When the oldest in flight was fetched."""
    asking_since: float | None
    """When the fetch that has no answer yet began."""
    progress_at: float
    """When something was last fetched or settled."""
    stuck: int
    problem: str | None
    """Why it waits."""
    flights: list[Flight] = []
    """The oldest in flight, and those that are stuck."""
    broken: bool = False
    """It failed and cannot go on."""
    held: str | None = None
    """Why it does not fetch everything although its source answers: it is paused, or what it needs is down."""
    paused: bool = False
    down_since: float | None = None
    """Since when what it needs is down, in seconds since 1970; None if it is up."""
    limited: int | None = None
    """Messages that wait here for its limit; None if it has none."""
    limited_since: float | None = None
    """Since when the oldest of them does."""

    def standing_still_since(self) -> float | None:
        """Since when nothing has moved although it has work or waits for a fetch. None if it is idle."""
        return self.progress_at if self.in_flight else self.asking_since


class WorkerStatus(msgspec.Struct, kw_only=True):
    """Status of a worker process."""

    consumers: list[ConsumerStatus]
    refused: str | None = None
    """Why it cannot run at all."""
    database: str | None = None
    """Why its database is not ready, if it is not."""
    pools: list[tuple[str, int, int]] = []
    """Of its connections to the database: for `threads` or `asyncio`, how many are in use, and how many it may open."""
    exit_code: int | None = None
    """In its last report: how it is about to exit."""
