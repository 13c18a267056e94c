"""What `onceward explain` and `onceward balance` say about a queue. Nothing here changes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from onceward._text import driver_message
from onceward.connectors.identities import seen, seen_in, unpack
from onceward.connectors.postgresql import statements as sql
from onceward.connectors.postgresql.address import connection_of, parts_of
from onceward.connectors.postgresql.join import is_joint
from onceward.connectors.postgresql.schema import WHICH_DATABASE, find_tables
from onceward.connectors.reports import (
    ANSWER_SECONDS,
    CHECK_SERVER,
    Durability,
    Forgotten,
    Hazard,
    Messages,
    Seen,
    ServerUnreachable,
    SourceBacklog,
    SourceCounts,
    SourceFacts,
    Survives,
    explain_unlisted,
)
from onceward.connectors.scheme import required_package
from onceward.db.engines import DatabaseTimeouts, connect_arguments
from onceward.db.poolers import expect_poolers

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from onceward.connectors.urls import Address


def describe_server(address: Address) -> SourceFacts:
    try:
        with _connect(address) as connection:
            fsync = connection.exec_driver_sql("SHOW fsync").scalar_one()
            commit = connection.exec_driver_sql("SHOW synchronous_commit").scalar_one()
            pages = connection.exec_driver_sql("SHOW full_page_writes").scalar_one()
            refuses = connection.exec_driver_sql("SHOW transaction_read_only").scalar_one()
            standby = connection.exec_driver_sql("SHOW synchronous_standby_names").scalar_one()
            unlogged = connection.exec_driver_sql(sql.UNLOGGED).scalars().all()
    except ServerUnreachable as error:
        return SourceFacts(redelivers=True, unreachable=(str(error),))
    return SourceFacts(
        durability=REFUSES if refuses == "on" else _durability(str(fsync), str(commit), str(standby)),
        redelivers=True,
        hazards=tuple(_hazards(str(pages), [str(each) for each in unlogged])),
    )


REFUSES = Durability(
    None,
    "the queue's PostgreSQL refuses to write: this is a replica, or default_transaction_read_only is on; no message "
    "can be taken",
    "name the primary server in the URL, and set default_transaction_read_only = off for this role",
    "cannot be written",
)


def _hazards(pages: str, unlogged: list[str]) -> Iterator[Hazard]:
    if pages == "off":
        yield Hazard(
            "the queue's PostgreSQL runs with full_page_writes=off: a power cut may break pages of the queue",
            "set full_page_writes = on in postgresql.conf",
        )
    if unlogged:
        yield Hazard(
            f"the queue has unlogged tables: {', '.join(unlogged)}; PostgreSQL empties them after a crash",
            f"ALTER TABLE {unlogged[0]} SET LOGGED",
        )


def _durability(fsync: str, commit: str, standby: str) -> Durability:
    if fsync == "off":
        return Durability(
            Survives.PROCESS_CRASH,
            "the queue's PostgreSQL runs with fsync=off: a power cut may lose messages, and break the database",
            "set fsync = on in postgresql.conf",
        )
    if commit == "off":
        return Durability(
            Survives.NOTHING,
            "the queue's PostgreSQL commits with synchronous_commit=off: a crash of its server may lose the last "
            "messages",
            "set synchronous_commit = on for this database",
        )
    if commit == "local" and standby:
        return Durability(
            Survives.PROCESS_CRASH,
            "the queue's PostgreSQL has a synchronous standby, and commits with synchronous_commit=local: it does not "
            "wait for the standby, and a failover may lose the last messages",
            "set synchronous_commit = on for this database",
        )
    return Durability(
        Survives.MACHINE_CRASH,
        "the queue's PostgreSQL writes every message through to its files before it confirms it; if they are on a "
        "disk, kill -9 and a power cut lose nothing",
    )


def is_in_database_of(address: Address, connection: Connection) -> bool:
    """Whether messages of this queue can leave it in transactions of this connection. Before its first use, whether the
    database is the same."""
    if connection.dialect.name != "postgresql":
        return False
    with _connect(address) as own:
        tables = find_tables(own)
        if tables is not None:
            return is_joint(connection, tables)
        return own.exec_driver_sql(WHICH_DATABASE).one() == connection.exec_driver_sql(WHICH_DATABASE).one()


def count_queue(address: Address) -> SourceCounts:
    _, queue = parts_of(address)
    with _connect(
        address, isolation_level="REPEATABLE READ"
    ) as connection:  # so all numbers are of one moment
        tables = find_tables(connection)
        if tables is None:
            return _count_nothing(
                address, f"its database has no queue yet; check the source {str(address)!r}"
            )

        def ask(statement: str, *values: Any) -> Any:
            return connection.exec_driver_sql(statement.format(s=tables.schema), values or (queue,))

        appended, done, moved = map(sum, zip(*ask(sql.TALLIES, queue, queue).all(), strict=True))
        pending = ask(sql.ALL_PENDING, queue, queue).all()
        dead = ask(sql.ALL_DEAD).all()
        listed = _list_ended(ask)
    if not appended and not pending and not dead:
        return _count_nothing(
            address, f"nothing was ever sent to queue {queue!r} of its database; check its name"
        )
    held = [seen_in(bytes(body), at) for body, at, _ in pending]
    held += [seen_in(bytes(body), at) for body, at in dead]
    messages = listed._replace(others=held)
    lost = int(done + moved) - len(listed.done) - len(listed.moved) - listed.forgotten.total
    return SourceCounts(
        appended=int(appended),
        done=int(done),
        moved=int(moved),
        pending=len(pending),
        untouched=sum(deliveries == 0 for _, _, deliveries in pending),
        dead=len(dead),
        messages=messages,
        unknown=explain_unlisted(lost, "the queue's log"),
    )


def read_backlog(address: Address) -> SourceBacklog:
    _, queue = parts_of(address)
    with _connect(address) as connection:
        tables = find_tables(connection)
        if tables is None:
            return SourceBacklog(waiting=0, in_flight=0, delayed=0, dead=0, oldest_age=0.0)

        def ask(statement: str) -> Any:
            return connection.exec_driver_sql(statement.format(s=tables.schema), {"queue": queue}).one()

        waiting, in_flight, delayed, dead = ask(sql.COUNTS)
        [age] = ask(sql.OLDEST)
    return SourceBacklog(
        waiting=waiting,
        in_flight=in_flight,
        delayed=delayed,
        dead=dead,
        oldest_age=max(float(age or 0.0), 0.0),
    )


def _list_ended(ask: Any) -> Messages:
    done: list[Seen] = []
    moved: list[Seen] = []
    for packed, at, digest in ask(sql.ALL_ENDED):
        like = done if digest is None else moved
        like += [seen(*identity, at, bytes(digest or b"")) for identity in unpack(packed)]
    numbers = ask(sql.ALL_FORGOTTEN).all()
    forgotten = Forgotten(
        {(first, last): ids for first, last, ids, _ in numbers}, 0, sum(copies for *_, copies in numbers)
    )
    return Messages(done, moved, [], forgotten)


def _count_nothing(address: Address, missing: str) -> SourceCounts:
    return SourceCounts(
        appended=0,
        done=0,
        pending=0,
        dead=0,
        moved=0,
        messages=Messages([], [], []),
        notes={"appended": "nothing has been sent yet"},
        missing=missing,
    )


@contextmanager
def _connect(address: Address, **options: Any) -> Iterator[Connection]:
    """Connect to it. Errors inside the block, too, become `ServerUnreachable`."""
    with required_package("psycopg", "postgres"):
        import psycopg  # noqa: F401
        from sqlalchemy import create_engine
        from sqlalchemy.exc import SQLAlchemyError

    url = connection_of(address)
    arguments = connect_arguments(url, DatabaseTimeouts(ANSWER_SECONDS), name="onceward")
    engine = expect_poolers(create_engine(url, connect_args=arguments, **options))
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise ServerUnreachable(f"cannot query {address}: {driver_message(error)}; {CHECK_SERVER}") from None
    finally:
        engine.dispose()
