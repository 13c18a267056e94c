"""The types in the interface of a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from typing import NamedTuple

from sqlalchemy import Connection


class Key(NamedTuple):
    """The identity of an event for one consumer."""

    consumer_id: str
    tracking_id: str
    day: int


class Found(NamedTuple):
    """What the inbox knows about an event that it did not admit."""

    digest: bytes | None
    """Of the payload with which it was done; None if it was not done."""
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
    is_new: bool


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
    """A range of one consumer's records, which a purge goes through in the order of tracking ids."""

    table: str
    consumer_id: str
    contract: str
    """The exact JSON text that was registered when the purge was planned."""
    floor_day: int
    """The first day to keep."""
    day: int = 0
    """Only for the dedup table."""


class PurgeStep(NamedTuple):
    """One bounded step of a purge."""

    rows: int
    """Rows removed."""
    upto: str | None
    """The last tracking id it checked; None at the end of the range."""


class StepTimes(NamedTuple):
    """The durations of one step, in seconds."""

    work: float
    total: float
    """Including the commit."""


class Overtaken(Exception):
    """The consumer was put on hold, re-registered or unregistered during the purge."""
