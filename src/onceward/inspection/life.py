"""The life of one message: where its id appears, in sources, inbox, outbox and dead letters, in the order of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from onceward._ids import same_id
from onceward.app.build import consumer_id
from onceward.connectors.reports import ServerUnreachable
from onceward.inspection.counts_database import has_tables
from onceward.inspection.probes import open_database

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from onceward.app.app import Consumer, Onceward

MOST_LISTED = 100_000
"""Messages of a source that are looked through; more would take too long for a page."""


class LifeMoment(NamedTuple):
    """One thing that happened to a message."""

    what: str
    """appended, waiting, sent, published, delivered, applied, parked, dead, …"""
    where: str
    at: float | None = None
    """Seconds since 1970; None if it is not known."""
    detail: str = ""
    letter: int | None = None
    """The number of its dead letter."""


class MessageLife(NamedTuple):
    id: str
    moments: tuple[LifeMoment, ...]
    unknown: tuple[str, ...]
    """Where nobody could look, and why."""


def life_of(app: Onceward, message_id: str) -> MessageLife:
    """Look for an id everywhere. Changes nothing."""
    wanted = same_id(message_id.strip())
    moments: list[LifeMoment] = []
    unknown: list[str] = []
    for consumer in app.consumers.values():
        try:
            moments += _in_source(consumer, wanted, unknown)
        except ServerUnreachable as error:
            unknown.append(f"{consumer.name}: {error}")
    database = app.settings.database
    if database is not None:
        names = {consumer_id(each): each.name for each in app.consumers.values()}
        try:
            with open_database(database) as connection:
                if connection is not None and has_tables(connection):
                    moments += _in_database(connection, wanted, names)
        except ServerUnreachable as error:
            unknown.append(str(error))
    return MessageLife(wanted, tuple(sorted(moments, key=_order)), tuple(unknown))


def _order(moment: LifeMoment) -> tuple[bool, float]:
    return moment.at is None, moment.at or 0.0


def _in_source(consumer: Consumer, wanted: str, unknown: list[str]) -> Iterator[LifeMoment]:
    where = f"source of {consumer.name}"
    backlog = consumer.source.backlog()
    if (backlog.waiting or 0) > MOST_LISTED:
        unknown.append(f"{where}: more than {MOST_LISTED:,} messages wait, which is too many to look through")
        return
    listed = consumer.source.counts().messages
    if listed is None:
        unknown.append(f"{where}: it does not list its messages")
        return
    for what, messages in (("acknowledged", listed.done), ("moved to the dead letters", listed.moved)):
        for each in messages:
            if same_id(each.tracking_id) == wanted:
                yield LifeMoment("appended", where, each.at or None, f"since then {what}")
    for each in listed.others:
        if same_id(each.tracking_id) == wanted:
            yield LifeMoment("appended", where, each.at or None, "waiting, in flight, or dead in the source")


def _in_database(connection: Connection, wanted: str, names: dict[str, str]) -> Iterator[LifeMoment]:
    from sqlalchemy import text

    def rows(query: str) -> Iterable[tuple[object, ...]]:
        return [tuple(row) for row in connection.execute(text(query), {"id": wanted})]

    def name(consumer: object) -> str:
        return names.get(str(consumer), str(consumer))

    for consumer, at, outcome in rows(_APPLIED):
        what = "applied" if outcome == "done" else str(outcome)
        yield LifeMoment(what, f"inbox of {name(consumer)}", _seconds(at))
    for consumer, starts, ends, at, error in rows(_ATTEMPTS):
        detail = f"{starts} started, {ends} ended" + (f"; last error: {error}" if error else "")
        yield LifeMoment("delivered", f"inbox of {name(consumer)}", _seconds(at), detail)
    for consumer, at in rows(_PARKED):
        yield LifeMoment("parked", f"inbox of {name(consumer)}", _seconds(at), "waits for an earlier one")
    for state, at, ended, failures in rows(_OUTBOX):
        yield LifeMoment(
            "sent", "outbox", _seconds(at), "" if ended is not None else f"{state}, {failures} failures"
        )
        if ended is not None:
            yield LifeMoment(str(state), "outbox", _seconds(ended))
    for number, consumer, first, died, status, settled in rows(_LETTERS):
        where = f"dead letters of {name(consumer)}"
        yield LifeMoment("first failed", where, _seconds(first), letter=_number(number))
        yield LifeMoment("dead", where, _seconds(died), f"now {status}", _number(number))
        if settled is not None:
            yield LifeMoment(str(status), where, _seconds(settled), letter=_number(number))


def _seconds(value: object) -> float | None:
    return None if value is None else float(str(value))


def _number(value: object) -> int:
    return int(str(value))


_APPLIED = "SELECT consumer_id, processed_at, outcome FROM onceward_dedup WHERE tracking_id = :id"
_ATTEMPTS = (
    "SELECT consumer_id, starts, ends, last_at, last_error FROM onceward_attempts WHERE tracking_id = :id"
)
_PARKED = "SELECT consumer_id, since FROM onceward_parked WHERE tracking_id = :id"
_OUTBOX = "SELECT state, created_at, ended_at, failures FROM onceward_outbox WHERE message_id = :id"
_LETTERS = """
    SELECT id, consumer, first_failed_at, died_at, status, settled_at FROM onceward_dead_letters
    WHERE message_id = :id OR tracking_id = :id
"""
