"""What holds the consumers of an app back: pauses, outages, limits, and dead letters that hold their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from onceward.failures.board import subjects_of
from onceward.failures.records import read_state
from onceward.failures.states import Down, FleetState, Paused
from onceward.inspection.counts_database import has_tables
from onceward.inspection.probes import open_database
from onceward.limits.usage import LimitUse, read_usage
from onceward.order.holds import HeldLine, read_lines
from onceward.storage.database import Sql

if TYPE_CHECKING:
    from onceward.app.app import Consumer, Onceward


class Holds(NamedTuple):
    state: FleetState = FleetState()
    limits: Mapping[str, LimitUse] = {}
    """By scope."""

    def pause_of(self, consumer: Consumer) -> Paused | None:
        return self.state.paused.get(consumer.identity)

    def outages_of(self, app: Onceward, consumer: Consumer) -> dict[str, Down]:
        """Of what it needs, by subject."""
        subjects = subjects_of(app.name, consumer.identity, consumer.failures.depends_on)
        return {each: self.state.down[each] for each in subjects if each in self.state.down}


def read_holds(database: str) -> Holds:
    """Read them. Changes nothing. Raises `ServerUnreachable`."""
    with open_database(database) as connection:
        if connection is None or not has_tables(connection):
            return Holds()
        rows = Sql(connection.dialect.name)
        return Holds(read_state(connection, rows), read_usage(connection, rows))


def held_lines(database: str, consumer: str, most: int) -> Sequence[HeldLine]:
    """The keys of a consumer, by its id, that dead letters hold, the oldest first. Raises `ServerUnreachable`."""
    with open_database(database) as connection:
        if connection is None or not has_tables(connection):
            return ()
        return read_lines(connection, Sql(connection.dialect.name), consumer, most)
