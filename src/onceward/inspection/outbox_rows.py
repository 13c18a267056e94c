"""What an outbox has: its rows, the tally of those that are gone, and its dead letters, by target."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec

from onceward.connectors.identities import identity_in, seen

if TYPE_CHECKING:
    from sqlalchemy import Connection

RELAY = "outbox-relay"
"""The consumer of its dead letters."""
WAITING = ("ready", "delayed", "held", "behind")
SETTLED = ("published", "moved", "dead")
# One statement, so all of it is of one moment.
_READ = """
    SELECT message_id, target, state, body, 0 AS messages FROM onceward_outbox
    UNION ALL SELECT what, target, NULL, NULL, messages FROM onceward_outbox_tally
"""
_LETTERS = f"SELECT message_id, status FROM onceward_dead_letters WHERE consumer = '{RELAY}'"


class TargetRows(msgspec.Struct):
    """The messages of one target."""

    states: Counter[str] = msgspec.field(default_factory=Counter)
    """How many rows there are of each state."""
    published: dict[str, str] = msgspec.field(default_factory=dict)
    """The ids of those that were published, as a sink knows them, and as the outbox does."""
    held: int = 0
    """Of the waiting: in flight, so the sink may have them."""
    moved: list[str] = msgspec.field(default_factory=list)
    """The ids of those that are dead letters."""
    tally: Counter[str] = msgspec.field(default_factory=Counter)
    """Of those that are gone, and how many were published: see the migration outbox_tally."""


class OutboxLedger(msgspec.Struct, frozen=True):
    targets: dict[str, TargetRows]
    letters: dict[str, str]
    """The status of dead letters, by the id of their message."""
    is_counted: bool = True
    """Whether the database has the tally."""


def read_outbox(connection: Connection) -> OutboxLedger:
    """Read all of it. Changes nothing."""
    from sqlalchemy import inspect, text

    inspector = inspect(connection)
    if not inspector.has_table("onceward_outbox"):
        return OutboxLedger({}, {})
    is_counted = inspector.has_table("onceward_outbox_tally")
    found: defaultdict[str, TargetRows] = defaultdict(TargetRows)
    for id, target, state, body, messages in connection.execution_options(yield_per=1000).execute(
        text(_READ if is_counted else _READ.partition("UNION")[0])
    ):
        rows = found[target]
        if state is None:
            rows.tally[id] += messages
            continue
        rows.states[state] += 1
        if state == "published":
            rows.published[seen(*identity_in(bytes(body))).tracking_id] = id
        elif state == "held":
            rows.held += 1
        elif state == "moved":
            rows.moved.append(id)
    letters = dict(tuple(each) for each in connection.execute(text(_LETTERS)))
    return OutboxLedger(dict(found), letters, is_counted)
