"""The types in the interface of a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection


class Key(NamedTuple):
    """An event for one consumer. Only `consumer_id` and `tracking_id` identify it."""

    consumer_id: str
    tracking_id: str
    day: int
    """Of the event's own time; copies may have another. It is compared with the horizon."""


class Found(NamedTuple):
    """What the inbox knows about an event that it did not admit."""

    digest: bytes | None
    """Of the content with which it was done, in one of the forms of `Digest`; None if it was not done."""
    floor_day: int | None


class Attempts(NamedTuple):
    """The counted attempts of an event."""

    starts: int
    ends: int
    locked_for: float = 0.0
    """Seconds until the lease expires: a worker has the event in flight, or died with it."""

    @property
    def locked(self) -> bool:
        return self.locked_for > 0

    @property
    def unended(self) -> int:
        return self.starts - self.ends


class Effect(NamedTuple):
    """A row of the effect ledger."""

    key: str
    state: str
    result: bytes | None
    age: float
    """Seconds since its key was first used."""
    valid_for: float | None
    """Seconds for which the provider remembers the key; None if unknown."""
    refusals: int
    is_new: bool = False

    @property
    def expired(self) -> bool:
        """Whether the provider may have forgotten the key."""
        return self.valid_for is not None and self.age >= self.valid_for

    def shortened(self, valid_for: float) -> Effect:
        """As `intend` leaves it if the code says that the key is valid for this long."""
        return self._replace(
            valid_for=valid_for if self.valid_for is None else min(self.valid_for, valid_for)
        )


def as_date(day: int) -> str:
    """Return an ISO date, or the plain number if the calendar does not reach that far."""
    try:
        return (date(1970, 1, 1) + timedelta(days=day)).isoformat()
    except OverflowError:
        return f"day {day}"


@contextmanager
def begun(connection: Connection, begin: str) -> Iterator[None]:
    """Run the block in a transaction, on a connection that does not begin one on its own."""
    connection.exec_driver_sql(begin)
    try:
        yield
    except BaseException:
        connection.exec_driver_sql("ROLLBACK")
        raise
    connection.exec_driver_sql("COMMIT")


class MissingDay(Exception):
    """The database has no partition for events of this day yet."""

    def __init__(self, day: int) -> None:
        super().__init__(day)
        self.day = day


class Records(NamedTuple):
    """A range of one consumer's records, which a purge goes through in the order of tracking ids or of age."""

    table: str
    consumer_id: str
    contract: str
    """The exact JSON text that was registered when the purge was planned."""
    floor_day: int
    """The first day to keep."""
    day: int = 0
    """Only for dedup rows of one day."""


class PurgeStep(NamedTuple):
    """One bounded step of a purge."""

    rows: int
    """Rows removed."""
    upto: Any
    """The last row it checked, by its tracking id or its age; None at the end of the range."""


class StepTimes(NamedTuple):
    """The durations of one step, in seconds."""

    work: float
    total: float
    """Including the commit."""


class Overtaken(Exception):
    """The consumer was put on hold, re-registered or unregistered during the purge."""
