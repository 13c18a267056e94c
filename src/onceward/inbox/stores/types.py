"""What stores give and take, beside plain values."""

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
    """What the inbox knows of an event that it did not admit."""

    digest: bytes | None
    """Of the payload it was done with; None if it was not done."""
    floor_day: int | None


class Attempts(NamedTuple):
    """The ledger of an event's attempts."""

    starts: int
    ends: int
    locked_for: float = 0.0
    """Seconds that are left of a lease: somebody has it in hand, or died with it."""

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
    """A day in words that people know; as a number where the calendar has no name for it."""
    try:
        return (date(1970, 1, 1) + timedelta(days=day)).isoformat()
    except OverflowError:
        return f"day {day}"


@contextmanager
def begun(connection: Connection, begin: str) -> Iterator[None]:
    """A transaction on a connection that begins none by itself."""
    connection.exec_driver_sql(begin)
    try:
        yield
    except BaseException:
        connection.exec_driver_sql("ROLLBACK")
        raise
    connection.exec_driver_sql("COMMIT")


class MissingDay(Exception):
    """The database has no room for events of this day yet."""

    def __init__(self, day: int) -> None:
        super().__init__(day)
        self.day = day


class Records(NamedTuple):
    """A stretch of one consumer's records, which a purge goes through in the order of tracking ids."""

    table: str
    consumer_id: str
    contract: str
    """As it was registered, to the letter, when the purge was planned."""
    floor_day: int
    """Nothing of this day or later goes."""
    day: int = 0
    """Of a stretch of the dedup table."""


class Step(NamedTuple):
    """One bounded step of a purge."""

    rows: int
    """Removed."""
    upto: str | None
    """The tracking id it came to; None at the end of the stretch."""


class Times(NamedTuple):
    """Of one step, in seconds."""

    work: float
    total: float
    """With the commit."""


class Overtaken(Exception):
    """While it was purged, the consumer was put on hold, registered anew, or taken off the registry."""
