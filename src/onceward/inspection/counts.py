"""What there is of each consumer: in its source, its inbox and among dead letters. It looks, and changes nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from onceward.connectors.urls import Address, file_of, shown_url
from onceward.errors import ConfigurationError
from onceward.inspection.balance import Balance, SourceCounts, strike
from onceward.inspection.counts_database import Kept, has_tables
from onceward.inspection.counts_redis import count_stream
from onceward.inspection.probes import ServerUnreachable, ask_boundary, asking_database

if TYPE_CHECKING:
    from sqlalchemy import Connection


class Account(NamedTuple):
    """One consumer, and where its messages are."""

    source: Address
    consumer: str
    """What inbox and dead letters know it by."""
    database: str | None
    contract: bool = False
    """Whether its code has one; a consumer that is registered has one, too."""
    may_be_new: bool = False
    """An app says where things will be. What somebody names by hand has to be there: it would be a mistyped name."""


def balance_of(account: Account) -> Balance:
    """The source is looked at first: what is done meanwhile is seen as done, not as missing.

    Except for the number of records, where a stream is to be read: see `Kept.among`.
    """
    recorded = _recorded(account) if account.source.kind == "redis" else 0
    counted, seen = _KINDS[account.source.kind](account.source)
    if counted.missing is not None and not account.may_be_new:
        raise ConfigurationError(counted.missing)
    if account.database is None:
        return strike(counted, None, None)
    with asking_database(account.database) as connection:
        is_new = connection is None or not has_tables(connection)
        if is_new and not account.may_be_new:
            raise ConfigurationError(_nothing_in(account.database, connection))
        kept = Kept(None if is_new else connection, account.consumer, contract=account.contract)
        if (counted.done or counted.moved) and not account.may_be_new and not kept.is_known:
            why = {**counted.untold, "applied": _unknown(account.consumer, kept.registered)}
            counted = msgspec.structs.replace(counted, untold=why)
        if seen is None:
            return strike(counted, kept.letters(account.source.origin), kept.records())
        letters, records = kept.among(seen, account.source.origin, recorded)
        return strike(counted, letters, records)


def _recorded(account: Account) -> int:
    """Records of this consumer that the inbox has now."""
    if account.database is None:
        return 0
    with asking_database(account.database) as connection:
        if connection is None or not has_tables(connection):
            return 0
        return Kept(connection, account.consumer, contract=account.contract).recorded


def _nothing_in(database: str, connection: Connection | None) -> str:
    what = "is not there" if connection is None else "has no tables of an inbox"
    return (
        f"the database {shown_url(database)} {what}; mend its URL, or make it with `onceward inbox migrate --database "
        "URL`"
    )


def _unknown(consumer: str, others: list[str]) -> str:
    return (
        f"the database knows no consumer {consumer!r}, but {', '.join(others) or 'none at all'}; if it has a contract, "
        "mend --consumer"
    )


# ── sources ─────────────────────────────────────────────────────────────────────────────────────────────


def _sqlite(source: Address) -> tuple[SourceCounts, None]:
    from onceward.connectors.sqlite import statements as sql

    path = Path(file_of(source)).absolute()
    if not path.is_file():
        return SourceCounts(
            appended=0,
            done=0,
            pending=0,
            dead=0,
            moved=0,
            untold={"appended": f"nothing has been sent yet: there is no file {path.name}"},
            missing=f"there is no file {path}; mend the source {str(source)!r} (three slashes: from this directory on, "
            "four: from the root)",
        ), None
    with _asking_file(path) as connection:
        connection.execute("PRAGMA query_only = ON")
        if connection.execute(sql.READ_APPLICATION_ID).fetchone()[0] != sql.APPLICATION_ID:
            raise ConfigurationError(f"{path} is no queue of onceward; see the source {str(source)!r}")
        if connection.execute(sql.READ_USER_VERSION).fetchone()[0] < sql.TALLIED_SINCE:
            pending, dead = connection.execute(sql.HELD).fetchone()
            why = {
                "appended": "an older onceward did not count; it is counted from the next opening of the file on"
            }
            return SourceCounts(pending=pending, dead=dead, untold=why), None
        connection.row_factory = sqlite3.Row
        counts = dict(connection.execute(sql.BALANCE).fetchone())
    return SourceCounts(**counts), None


@contextmanager
def _asking_file(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=10.0)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise ServerUnreachable(f"the queue {path} cannot be read: {error}") from None


def _boundary(source: Address) -> tuple[SourceCounts, None]:
    stats = ask_boundary(source)
    name = source.settings["consumer"]
    offsets = {each["name"]: each["offset"] for each in stats["consumers"]}
    offset = offsets.get(name)
    confirmed = offset or 0
    expired = max(stats["first"] - 1 - confirmed, 0)
    return SourceCounts(
        appended=stats["last"],
        done=confirmed,
        pending=stats["last"] - confirmed - expired,
        dead=0,
        dropped={"expired before it was confirmed": expired} if expired else {},
        has_copies=False,
        untold={} if offset is not None else {"pending": f"{name} has never fetched: all facts wait for it"},
        missing=_no_cursor(source, name, list(offsets)) if offset is None and offsets else None,
    ), None


def _no_cursor(source: Address, name: str, others: list[str]) -> str:
    return (
        f"the boundary of {source.origin} knows no consumer {name!r}, but {', '.join(others)}; mend ?consumer= of the "
        "source, or start it once"
    )


def _memory(source: Address) -> tuple[SourceCounts, None]:
    return SourceCounts(
        untold={"appended": "it is in the memory of the process that runs the consumer, and nowhere else"}
    ), None


_KINDS: dict[str, Any] = {
    "sqlite": _sqlite,
    "redis": count_stream,
    "boundary": _boundary,
    "memory": _memory,
}
