"""A model of the tables of a PostgreSQL queue: rows with locks, in transactions, as its statements use them.

A claim skips rows that another transaction has locked; any other statement waits for them, and then looks at them
again. What a transaction has changed is undone if it does not commit. Every method is one statement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onceward.connectors.leased_deliveries import Held
from onceward.connectors.leases import AvailableRow


@dataclass
class QueueRow:
    body: bytes
    leased_until: float = 0.0
    token: int | None = None
    deliveries: int = 0
    lost: int = 0
    visible_at: float | None = None
    """When it comes, if it waits in the table of delayed messages."""


class QueueTransaction:
    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.undo: list[Callable[[], None]] = []
        self.seen: list[Callable[[], None]] = []
        """What to tell an observer when it commits."""
        self.is_over = False


class Locked(Exception):
    """Another transaction has this row."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"row {seq} is locked")
        self.seq = seq


class ModelQueue:
    """`clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self.locked: dict[int, QueueTransaction] = {}
        """Who has locked which row."""
        self.rows: dict[int, QueueRow] = {}
        self.dead: dict[int, bytes] = {}

    def begin(self) -> QueueTransaction:
        return QueueTransaction()

    def commit(self, transaction: QueueTransaction) -> None:
        for tell in transaction.seen:
            tell()
        self._end(transaction)

    def roll_back(self, transaction: QueueTransaction) -> None:
        if not transaction.is_over:
            for undo in reversed(transaction.undo):
                undo()
            self._end(transaction)

    def _end(self, transaction: QueueTransaction) -> None:
        transaction.is_over = True
        for seq in transaction.locked:
            del self.locked[seq]
        transaction.locked.clear()

    # ── statements ──────────────────────────────────────────────────────────────────────────────────────

    def append(self, transaction: QueueTransaction, bodies: Sequence[bytes]) -> list[int]:
        seqs = []
        for body in bodies:
            seq = next(self._numbers)
            self._put(transaction, seq, QueueRow(body))
            seqs.append(seq)
        return seqs

    def move_due(self, transaction: QueueTransaction, limit: int) -> int:
        now = self._clock()
        due = [
            (row.visible_at, seq)
            for seq, row in self.rows.items()
            if row.visible_at is not None and row.visible_at <= now and self._is_free(transaction, seq)
        ]
        for _, seq in sorted(due)[:limit]:
            self._put(
                transaction, seq, replace(self.rows[seq], visible_at=None, leased_until=0.0, token=None)
            )
        return len(due[:limit])

    def ready(self, transaction: QueueTransaction, after: int, limit: int) -> list[AvailableRow]:
        """Lock them, and skip what others have locked."""
        now = self._clock()
        found = [
            (seq, row)
            for seq, row in sorted(self.rows.items())
            if seq > after
            and row.visible_at is None
            and row.leased_until <= now
            and self._is_free(transaction, seq)
        ][:limit]
        for seq, _ in found:
            self._lock(transaction, seq)
        return [
            (seq, row.token, row.deliveries, row.lost + (row.token is not None), row.body)
            for seq, row in found
        ]

    def lease(
        self, transaction: QueueTransaction, rows: Sequence[AvailableRow], token: int, lease: float
    ) -> None:
        until = self._clock() + lease
        for seq, _, deliveries, lost, _ in rows:
            row = self.rows[seq]
            self._put(
                transaction,
                seq,
                replace(row, leased_until=until, token=token, deliveries=deliveries + 1, lost=lost),
            )

    def extend(self, transaction: QueueTransaction, held: Held, lease: float) -> bool:
        row = self._ours(transaction, *held)
        if row is not None:
            self._put(transaction, held[0], replace(row, leased_until=self._clock() + lease))
        return row is not None

    def remove(self, transaction: QueueTransaction, held: Held) -> bool:
        row = self._ours(transaction, *held)
        if row is not None:
            self._put(transaction, held[0], None)
        return row is not None

    def give_back(self, transaction: QueueTransaction, held: Held) -> bool:
        row = self._ours(transaction, *held)
        if row is not None:
            back = replace(row, leased_until=0.0, token=None, deliveries=row.deliveries - 1)
            self._put(transaction, held[0], back)
        return row is not None

    def delay(self, transaction: QueueTransaction, held: Held, delay: float, uncounted: int) -> bool:
        row = self._ours(transaction, *held)
        if row is not None:
            later = replace(row, visible_at=self._clock() + delay, deliveries=row.deliveries - uncounted)
            self._put(transaction, held[0], later)
        return row is not None

    def bury(self, transaction: QueueTransaction, seq: int, token: int | None) -> bool:
        row = self._ours(transaction, seq, token)
        if row is not None:
            self._put(transaction, seq, None)
            self.dead[seq] = row.body
            transaction.undo.append(lambda: self._unbury(seq))
        return row is not None

    def _unbury(self, seq: int) -> None:
        del self.dead[seq]

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────

    def _is_free(self, transaction: QueueTransaction, seq: int) -> bool:
        return self.locked.get(seq, transaction) is transaction

    def _lock(self, transaction: QueueTransaction, seq: int) -> None:
        if not self._is_free(transaction, seq):
            raise Locked(seq)
        self.locked[seq] = transaction
        transaction.locked.add(seq)

    def _ours(self, transaction: QueueTransaction, seq: int, token: int | None) -> QueueRow | None:
        """Lock the row, and return it if it has this token. Raises `Locked` if the caller has to wait."""
        row = self.rows.get(seq)
        if row is None and self._is_free(transaction, seq):
            return None
        self._lock(transaction, seq)
        row = self.rows.get(seq)
        return row if row is not None and row.visible_at is None and row.token == token else None

    def _put(self, transaction: QueueTransaction, seq: int, row: QueueRow | None) -> None:
        self._lock(transaction, seq)
        before = self.rows.get(seq)
        transaction.undo.append(lambda: self._restore(seq, before))
        self._restore(seq, row)

    def _restore(self, seq: int, row: QueueRow | None) -> None:
        if row is None:
            self.rows.pop(seq, None)
        else:
            self.rows[seq] = row
