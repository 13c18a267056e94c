"""The rows of a leasing queue in PostgreSQL: its connections, one transaction for each call, and forks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import md5, sha256
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import URL

from onceward._process.forks import forks
from onceward._text import storable
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.identities import EPOCH, identity_in, identity_of, pack, unpack
from onceward.connectors.lease_rules import BurialReason, DeadMessage, read_dead_message
from onceward.connectors.leased_deliveries import Held
from onceward.connectors.leases import WRITE_WAIT, AvailableRow, seconds_until_due
from onceward.connectors.postgresql import statements as sql
from onceward.connectors.postgresql.direct_connection import DirectConnection
from onceward.connectors.postgresql.join import is_joint
from onceward.connectors.postgresql.lines import PostgreSqlLines, as_array
from onceward.connectors.postgresql.schema import (
    BATCH,
    CHANNEL,
    QueueTables,
    create_tables,
    find_tables,
    update_functions,
)
from onceward.connectors.postgresql.vacuum import QueueVacuum
from onceward.db.calls import CALLS
from onceward.db.engines import connect_arguments, hide_values
from onceward.db.operations import run_first
from onceward.db.transaction import DbTransaction
from onceward.task.exceptions import ExceptionCategory
from onceward.transaction import Transaction

CONNECTIONS = 2
"""Connections that a connector keeps, beside the one for calls of one statement. Under load it opens another."""
SLOW = 0.002
"""Seconds. A claim that takes longer has probably passed many rows that it cannot take: leased ones, or dead ones that
no vacuum may remove because of an old transaction. If it was only large, messages given back wait a little."""
SELDOM = 20
"""After a slow claim from the beginning, the next ones continue where the last one ended, for this many times as
long as the slow one took."""
MOVE_EVERY = 0.2
"""Seconds between two looks at the messages that wait for a time, while others are ready."""
WRITE_LIMIT = f"{WRITE_WAIT * 1000:.0f}"
"""`WRITE_WAIT` in milliseconds."""
TIDY_EVERY = 10_000
"""Messages that a connector ends or appends before it shortens the log, and looks for dead rows."""


class PostgreSqlLeaseStore(PostgreSqlLines):
    """A `LeaseStore` in the tables of `schema`. Its times are seconds from now: `now` is 0, and the server adds its
    clock. Threads have a transaction each, at the same time."""

    def __init__(self, url: URL, queue: str) -> None:
        self.queue = queue
        self.engine = open_engine(url)
        self._direct = DirectConnection(self.engine)
        self.place = f"database {url.database!r}"
        self.channel = CHANNEL + md5(queue.encode(), usedforsecurity=False).hexdigest()
        self._closed = False
        self._generation = forks.generation
        self._current = threading.local()
        self._tables: QueueTables | None = None
        self._sql: dict[str, str] = {}
        self._last = -1
        """The last message that was leased here."""
        self._look_back_at = 0.0
        self._move_at = 0.0
        self._untidied = 0
        self._vacuum = QueueVacuum()
        self._known_due: float | None = None
        """When a message is due, by our own clock, if the last call was a claim in vain."""

    # ── connections and transactions

    @contextmanager
    def transaction(self, wait: float) -> Iterator[None]:
        with self._connect() as connection, connection.begin():
            connection.exec_driver_sql(sql.BEGIN, (f"{wait * 1000:.0f}",)).close()
            self._current.connection = connection
            self._current.has_news = False
            self._known_due = None
            try:
                yield
                if self._current.has_news:
                    self._run(sql.NOTIFY, (self.channel,))
            finally:
                del self._current.connection

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        if self._closed:
            raise ConnectorClosedError(
                f"the connector to queue {self.queue!r} is closed; create a new one to continue"
            )
        if self._generation != forks.generation:
            self._generation = forks.generation
            self.engine.dispose(close=False)  # its connections are the parent's
        with self.engine.connect() as connection:
            if self._tables is None:
                with connection.begin():
                    self._tables = find_tables(connection)
                if self._tables is None:
                    with connection.begin():
                        self._tables = create_tables(connection, self.place)
                elif not self._tables.is_current:
                    with connection.begin():
                        self._tables = update_functions(connection, self._tables)
            yield connection

    @property
    def tables(self) -> QueueTables | None:
        """Where its tables are; None before its first call."""
        return self._tables

    def _run(self, statement: str, values: Any = ()) -> Any:
        connection: Connection = self._current.connection
        return connection.exec_driver_sql(self.statement(statement), values)

    def _rows(self, statement: str, values: Any) -> list[Any]:
        """The rows of a query, as the driver has them: SQLAlchemy takes longer for each than for the query."""
        with self._run(statement, values) as result:
            rows: list[Any] = result.cursor.fetchall()
        return rows

    def statement(self, statement: str) -> str:
        found = self._sql.get(statement)
        if found is None:
            assert self._tables is not None
            found = self._sql[statement] = statement.format(s=self._tables.schema)
        return found

    def close(self) -> None:
        self._closed = True
        self._direct.close()
        self.engine.dispose(close=self._generation == forks.generation)

    def claim_new(self, limit: int, token: int, lease: float) -> list[tuple[int, bytes]] | None:
        """Lease messages that were never delivered, in one statement. None if that cannot be: use a transaction."""
        if self._tables is None or not self._tables.claims_at_once:
            return None
        began = time.monotonic()
        after = self._last if began < self._look_back_at else -1
        found = self._call_alone(sql.CLAIM, (self.queue, limit, token, lease, after))
        took = time.monotonic() - began
        if len(found) < limit:
            self._look_back_at = 0.0
        elif took > SLOW and after < 0:
            self._look_back_at = began + took * SELDOM
        seq, _, due = found[0]
        if seq is None:
            self._known_due = began + float(due)
            return None if due < 0 else []
        self._last = found[-1][0]
        return [(seq, body) for seq, body, _ in found]

    def seconds_until_due(self) -> float:
        """How long until a message is available, if none arrives."""
        known = self._known_due
        return seconds_until_due(self, self.now) if known is None else known - time.monotonic()

    # ── LeaseStore

    def now(self) -> float:
        return 0.0

    def append(self, bodies: Sequence[bytes], now: float) -> None:
        for first in range(0, len(bodies), BATCH):
            self._run(sql.APPEND, (self.queue, list(bodies[first : first + BATCH])))
        self._untidied += len(bodies)

    def append_alone(self, bodies: Sequence[bytes], now: float, wait: float) -> bool:
        """Append in one round trip, which is a transaction of its own. False if there are too many for that."""
        if len(bodies) > BATCH:
            return False
        limit = WRITE_LIMIT if wait == WRITE_WAIT else f"{wait * 1000:.0f}"
        if len(bodies) == 1:  # an array takes the driver longer
            self._call_alone(sql.APPEND_ONE, (limit, self.queue, bodies[0]))
        else:
            self._call_alone(sql.APPEND_ALONE, (limit, self.queue, list(bodies)))
        self._untidied += len(bodies)
        return True

    def _call_alone(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        """Return the rows of a statement that is a transaction of its own."""
        if self._tables is not None and not self._closed and self._generation == forks.generation:
            found = self._direct.execute(self.statement(statement), values)
            if found is not None:
                return found
        with self._connect() as connection:
            plain = connection.execution_options(isolation_level="AUTOCOMMIT")
            return plain.exec_driver_sql(self.statement(statement), tuple(values)).all()

    def available(self, now: float, limit: int) -> Sequence[AvailableRow]:
        moved = self._move_due(limit) if time.monotonic() >= self._move_at else None
        rows: list[AvailableRow] = []
        if time.monotonic() < self._look_back_at:
            rows = self._ready(self._last, limit)
        if len(rows) < limit:
            began = time.monotonic()
            rows = self._ready(-1, limit)
            took = time.monotonic() - began
            self._look_back_at = began + took * SELDOM if took > SLOW else 0.0
        if len(rows) < limit and moved is None and self._move_due(limit):
            rows = self._ready(-1, limit)
        return rows

    def _ready(self, after: int, limit: int) -> list[AvailableRow]:
        ready = sql.FIRST_READY if self._in_lines else sql.READY
        return self._rows(ready, (self.queue, after, limit))

    def _move_due(self, limit: int) -> int:
        self._move_at = time.monotonic() + MOVE_EVERY
        return int(self._run(sql.MOVE_DUE, (self.queue, limit)).scalar_one())

    def due(self) -> float | None:
        found = self._run(sql.NEXT_DUE, {"queue": self.queue}).scalar()
        return None if found is None else float(found)

    def lease(self, rows: Sequence[AvailableRow], token: int, until: float) -> None:
        if not rows:
            return
        keys, deliveries, lost = (
            as_array([row[0] for row in rows]),
            as_array([row[2] + 1 for row in rows]),
            as_array([row[3] for row in rows]),
        )
        self._run(sql.LEASE, (self.queue, keys, deliveries, lost, token, until))
        self._last = rows[-1][0]

    def extend(self, deliveries: Sequence[Held], until: float) -> Sequence[Held]:
        return self._missed(sql.EXTEND, deliveries, until)

    def release(self, first: int, last: int) -> int:
        """End the leases of all deliveries whose token is in this range. Return how many."""
        self._tell()
        return int(self._run(sql.RELEASE, (self.queue, first, last)).rowcount)

    def remove(self, deliveries: Sequence[Held], transactions: Sequence[Transaction]) -> Sequence[Held]:
        missed = self._missed(sql.REMOVE, deliveries)
        if missed:
            pairs = zip(deliveries, transactions, strict=True)
            transactions = [transaction for held, transaction in pairs if held not in missed]
        if transactions:
            messages = pack(map(identity_of, transactions))
            self._run(sql.LOG_DONE, (self.queue, len(transactions), messages))
            self._untidied += len(transactions)
        return missed

    def _missed(self, statement: str, deliveries: Sequence[Held], *more: Any) -> list[Held]:
        """Return those that it did not change."""
        if not deliveries:
            return []
        ordered = sorted(deliveries)  # so two transactions with the same rows wait, and are not in a deadlock
        keys, tokens = [key for key, _ in ordered], [token for _, token in ordered]
        changed = {key for (key,) in self._run(statement, (self.queue, keys, tokens, *more))}
        return [held for held in deliveries if held[0] not in changed]

    def _tell(self) -> None:
        """Other messages are available than were, or at other times: let those know who wait."""
        self._look_back_at = 0.0
        self._current.has_news = True

    def give_back(self, key: int, token: int, visible_at: float) -> bool:
        self._tell()
        if visible_at <= 0:
            return bool(self._run(sql.GIVE_BACK, (self.queue, key, token)).rowcount == 1)
        return self._delay(key, token, visible_at, uncounted=1)

    def hasten(self, key: int) -> None:
        self._tell()
        self._run(sql.HASTEN, {"queue": self.queue, "seq": key}).close()

    def delay(
        self,
        key: int,
        token: int,
        until: float,
        category: ExceptionCategory | None,
        error: str | None,
        history: str,
    ) -> bool:
        self._tell()
        return self._delay(key, token, until, category=category, error=error, history=history)

    def _delay(
        self,
        key: int,
        token: int,
        delay: float,
        *,
        uncounted: int = 0,
        category: str | None = None,
        error: str | None = None,
        history: str = "",
    ) -> bool:
        values = {
            "queue": self.queue,
            "seq": key,
            "token": token,
            "delay": delay,
            "uncounted": uncounted,
            "category": category and str(category),
            "error": error and storable(error),
            "history": storable(history),
        }
        return bool(self._run(sql.DELAY, values).rowcount == 1)

    def bury(
        self,
        key: int,
        token: int | None,
        now: float,
        reason: BurialReason,
        transaction_id: str | None,
        category: ExceptionCategory | None = None,
        error: str | None = None,
        history: str = "",
    ) -> bool:
        values = {
            "queue": self.queue,
            "seq": key,
            "token": token,
            "id": transaction_id and storable(transaction_id),
            "reason": str(reason),
            "category": category and str(category),
            "error": error and storable(error),
            "history": storable(history),
        }
        number = self._run(sql.BURY, values).scalar()
        if self._holds_lines and number is not None:
            self._run(sql.HOLD_LINE, {"dead": number, "queue": self.queue, "seq": key}).close()
        return number is not None

    def counts(self, now: float) -> dict[str, int]:
        counts = self._run(sql.COUNTS, {"queue": self.queue}).one()
        return dict(zip(("ready", "leased", "delayed", "dead"), counts, strict=True))

    def dead(self, limit: int) -> list[DeadMessage]:
        return [read_dead_message(*row) for row in self._run(sql.DEAD_LETTERS, (self.queue, limit))]

    def forget_dead(self, keys: Sequence[int]) -> None:
        for at, body in self._run(sql.FORGET_DEAD, (self.queue, list(keys))).all():
            values = (self.queue, pack([identity_in(body)]), at, sha256(body).digest())
            self._run(sql.LOG_MOVED, values)

    def acknowledge_dead(self, keys: Sequence[int]) -> None:
        bodies = [body for _, body in self._run(sql.FORGET_DEAD, (self.queue, list(keys)))]
        if bodies:
            self._run(sql.LOG_DONE, (self.queue, len(bodies), pack(map(identity_in, bodies))))

    # ── one commit with the application

    def joins(self, connection: Connection) -> bool:
        """Whether this connection of the application sees the tables of this queue, and may remove a delivery."""
        return self._tables is not None and is_joint(connection, self._tables)

    def remove_in(self, transaction: DbTransaction, held: Held, delivered: Transaction) -> bool:
        """Remove a delivery in the transaction of the application. Return whether its lease was still ours."""
        key, token = held
        message = pack([identity_of(delivered)])
        values = {"queue": self.queue, "seq": key, "token": token, "message": message}
        (removed,) = run_first(transaction, self.statement(sql.DONE), values)[1]
        self._untidied += removed
        return bool(removed)

    def remove_all_in(
        self, transaction: DbTransaction, deliveries: Mapping[Held, Transaction]
    ) -> list[Transaction]:
        """As `remove_in`, of several. Return those whose lease was still ours."""
        run, ordered = transaction.connection.execute, sorted(deliveries)  # as in `_missed`
        values: dict[str, Any] = {"queue": self.queue}
        values["seqs"], values["tokens"] = [key for key, _ in ordered], [token for _, token in ordered]
        removed = set(run(text(self.statement(sql.REMOVE_ALL)), values).scalars())
        done = [transaction for (key, _), transaction in deliveries.items() if key in removed]
        if done:
            values = {"queue": self.queue, "ended": len(done), "messages": pack(map(identity_of, done))}
            run(text(self.statement(sql.LOG_ALL)), values).close()
        self._untidied += len(done)
        return done

    # ── from time to time

    def tidy(self) -> None:
        """If there is enough to do, shorten the log, and vacuum."""
        if self._untidied < TIDY_EVERY:
            return
        self._untidied = 0
        with self.transaction(WRITE_WAIT):
            if self._run(sql.LOCK_LOG, (self.queue,)).scalar_one():
                self.fold(sql.KEPT)
        with self._connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            assert self._tables is not None
            self._vacuum.run_if_due(connection, self._tables.schema)

    def fold(self, kept: int) -> None:
        """Of messages that ended long ago, keep only numbers in the log."""
        upto = self._run(sql.OLDEST_KEPT, {"queue": self.queue, "kept": kept}).scalar()
        if upto is None:
            return
        appended = done = moved = 0
        by_day: dict[int, list[str]] = {}
        for row in self._run(sql.LEAVE_LOG, (self.queue, upto)).all():
            appended += row.appended
            if row.digest is None:
                done += row.ended
            else:
                moved += row.ended
            for tracking_id, created_at in unpack(row.messages) if row.messages else ():
                by_day.setdefault((created_at - EPOCH).days, []).append(tracking_id)
        self._run(sql.ADD_TOTALS, (self.queue, appended, done, moved))
        for day, listed in sorted(by_day.items()):
            ids = len(set(listed))
            self._run(sql.ADD_FORGOTTEN, (self.queue, day, day, ids, len(listed) - ids))


def open_engine(url: URL) -> Engine:
    """Return an engine for a queue, whose connections are its own."""
    # A pooler in transaction mode may not know prepared statements; most of the work is in functions anyway.
    arguments = {**connect_arguments(url, name="onceward-queue"), "prepare_threshold": None}
    engine = create_engine(
        url,
        connect_args=arguments,
        isolation_level="READ COMMITTED",  # whatever the database's default: a claim skips what others have
        pool_size=CONNECTIONS,
        max_overflow=CONNECTIONS - 1,
        pool_timeout=WRITE_WAIT,
    )
    CALLS.watch(hide_values(engine))
    return engine


def append_in(
    connection: Connection, queue: str, bodies: Sequence[bytes], visible_at: float | None = None
) -> None:
    """Put messages on a queue of this database, in the transaction that is open on the connection.

    They are there when it commits, and if it rolls back they never were. `encode_all` of `onceward.connectors.codec`
    makes bodies from transactions. `visible_at`, in seconds since 1970, is for messages that come later. The tables
    must exist already: a connector creates them at its first use.
    """
    statement = text(
        "SELECT onceward_queue_append(:queue, CAST(:bodies AS bytea[]), CAST(:visible_at AS double precision))"
    )
    for first in range(0, len(bodies), BATCH):
        values = {"queue": queue, "bodies": list(bodies[first : first + BATCH]), "visible_at": visible_at}
        connection.execute(statement, values).close()
