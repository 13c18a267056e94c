"""Claims of the relay: which messages it may send now, under a lease, and how each of them ended.

Every row of a claim has the same token, a new one for each claim, so what an earlier claim wants to change later
changes nothing. A claim takes the ready messages of one target, in the order of their numbers. Of a key it takes only
the first ones: a message that stands behind a held one waits until that is published or dead. So the order of a key is
kept, however many relays there are; and because a claim looks at the state of each row, never at numbers that it has
seen, a row that commits late is not skipped.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Engine

from onceward._sync import run_blocking
from onceward.connectors.owners import new_token, tokens_of
from onceward.db.operations import key_of
from onceward.db.transaction import DbTransaction
from onceward.outbox import statements as sql
from onceward.storage.database import BlockingStoragePorts, Sql, read_committed

T = TypeVar("T")

ROWS = 500
"""Messages in one claim, at most."""
PROMOTED = 1000
"""Messages that become ready in one turn, at most, because they are due or their lease is over."""
PAGES = 10
"""Pages of `ROWS` messages that a turn puts behind others before it gives way to the other relays."""
UNBLOCKED = 100
"""Messages of a key that come forward together."""
SUSPECT = 2
"""Lost leases after which a message is sent alone: it may be what kills its relays."""
LOCK = key_of("onceward outbox")


class Row(NamedTuple):
    """A claimed message: the columns that `CLAIM` returns."""

    seq: int
    message_id: str
    key: str | None
    attempts: int
    lost: int
    failures: int
    body: bytes


class OutboxClaim(msgspec.Struct, frozen=True):
    """Messages of one target, in the order in which they are to be sent."""

    token: int
    target: str
    rows: tuple[Row, ...]


class SendFailure(NamedTuple):
    """A message that its sink did not take."""

    row: Row
    error: str
    line: str
    """Of its history."""
    delay: float | None
    """Seconds until it is tried again; None to bury it."""


class Ending(msgspec.Struct, kw_only=True):
    """How the messages of a claim ended."""

    published: list[Row] = msgspec.field(default_factory=list)
    failed: list[SendFailure] = msgspec.field(default_factory=list)
    returned: list[Row] = msgspec.field(default_factory=list)
    """Not sent, or of unknown outcome, and no fault of their own."""


class Outlook(NamedTuple):
    """What a look at the table shows, without a lock."""

    targets: frozenset[str]
    """With ready messages."""
    is_due: bool
    """Whether messages are delayed or held that need not be any longer."""
    wait: float
    """Seconds until the next one is."""


class OutboxRows:
    """The table of the outbox, as the relay uses it. Every call is a transaction of its own."""

    def __init__(self, engine: Engine, clock: Callable[[], float] | None = None) -> None:
        self.dialect = engine.dialect.name
        self._ports = BlockingStoragePorts(read_committed(engine))
        self._sql = Sql(self.dialect, clock)
        self._has_clock = self.dialect != "sqlite"

    def look(self) -> Outlook:
        """Look for work. Takes no lock, so it may be called often."""
        if not self._has_clock:  # its first reading may be a write
            self._transact(self._sql.steady)
            self._has_clock = True

        def look(connection: Any) -> Outlook:
            statement = sql.LOOK_SQLITE if self.dialect == "sqlite" else sql.LOOK_POSTGRESQL
            found = self._sql.on(connection, statement).one()
            due = float("inf") if found.due is None else found.due - found.now
            over = float("inf") if found.over is None else found.over - found.steady
            targets = frozenset(json.loads(found.targets))
            return Outlook(targets, min(due, over) <= 0, max(min(due, over), 0.0))

        return run_blocking(self._ports.outside(look))

    def claim(
        self,
        size: int,
        *,
        without: Collection[str],
        promote: bool,
        lease: float,
        owner: str | None,
        targets: Collection[str] = (),
    ) -> list[OutboxClaim]:
        """Claim messages of at most `size` targets, other than `without`. `targets` are those that a look has found.
        With `promote`, let messages that are due become ready first, whatever their targets."""
        while True:
            claims, gave_way = self._transact(
                self._claim, size, without, promote, lease, owner, targets, turn=True
            )
            if claims or not gave_way:
                return claims

    def extend(self, claims: Sequence[OutboxClaim], lease: float) -> list[OutboxClaim]:
        """Keep these for another lease. Return those that were lost, at least in part."""

        def extend(transaction: DbTransaction) -> list[OutboxClaim]:
            return [
                each
                for each in claims
                if self._change(transaction, sql.EXTEND, _seqs(each.rows), token=each.token, lease=lease)
                < len(each.rows)
            ]

        return self._transact(extend)

    def end(self, claim: OutboxClaim, ending: Ending, *, uncount: bool = False) -> int:
        """Record how the messages of a claim ended. Return how many are no longer ours. `uncount`: they were not even
        tried."""
        free_keys = {each.key for each in ending.published} | {
            each.row.key for each in ending.failed if each.delay is None
        }
        keys = [key for key in free_keys if key is not None]
        return self._transact(self._end, claim, ending, uncount, keys, turn=bool(keys))

    def dead(self, limit: int) -> list[dict[str, Any]]:
        return self._transact(lambda transaction: self._sql.all(transaction, sql.DEAD, limit=limit))

    def forget_dead(self, seqs: Sequence[int]) -> None:
        self._transact(self._change, sql.MOVED, list(seqs))

    def release(self, owner: str) -> int:
        """End the leases of an owner that is dead. Return how many there were."""
        first, last = tokens_of(owner)
        return self._transact(lambda each: self._sql.changed(each, sql.RELEASE, first=first, last=last))

    def unblock_stranded(self) -> int:
        def unblock(transaction: DbTransaction) -> int:
            stranded = sql.STRANDED_SQLITE if self.dialect == "sqlite" else sql.STRANDED_POSTGRESQL
            return self._change(transaction, sql.BRING_FORWARD, self._find(transaction, stranded))

        return self._transact(unblock, turn=True)

    def purge(self, retention: float, limit: int) -> int:
        """Remove messages that were published so many seconds ago, at most `limit`. Return how many."""

        def purge(transaction: DbTransaction) -> int:
            old = self._find(transaction, sql.OLD, retention=retention, limit=limit)
            removed = self._change(transaction, sql.PURGE, old)
            add_up = sql.ADD_UP_SQLITE if self.dialect == "sqlite" else sql.ADD_UP_POSTGRESQL
            for statement in add_up:
                self._sql.run(transaction, statement)
            return removed

        return self._transact(purge)

    def waiting(self) -> dict[str, int]:
        """How many messages of each target wait, other than delayed ones."""

        def read(transaction: DbTransaction) -> dict[str, int]:
            found = self._sql.run(transaction, sql.WAITING).all()
            return {each.target: int(each.messages) for each in found}

        return run_blocking(self._ports.look(read))

    # ── inside a transaction ────────────────────────────────────────────────────────────────────────────

    def _claim(
        self,
        transaction: DbTransaction,
        size: int,
        without: Collection[str],
        promote: bool,
        lease: float,
        owner: str | None,
        targets: Collection[str],
    ) -> tuple[list[OutboxClaim], bool]:
        """Return claims, and whether it gave way before it had looked at all messages."""
        if promote:
            for which, become_ready in (sql.OVER, sql.PROMOTE_OVER), (sql.DUE, sql.PROMOTE_DUE):
                self._change(transaction, become_ready, self._find(transaction, which, limit=PROMOTED))
            targets = self._sql.run(transaction, sql.TARGETS).scalars().all()
        wanted = [each for each in targets if each not in without]
        random.shuffle(wanted)  # so none is always the last
        claims: list[OutboxClaim] = []
        gave_way = False
        for target in wanted:
            if len(claims) == size:
                break
            seqs = self._choose(transaction, target)
            gave_way |= seqs is None
            if seqs:
                token = new_token(owner or "")
                found = self._run(transaction, sql.CLAIM, seqs, token=token, lease=lease)
                claims.append(OutboxClaim(token, target, tuple(sorted(Row(*each) for each in found))))
        return claims, gave_way

    def _choose(self, transaction: DbTransaction, target: str) -> list[int] | None:
        """Return the numbers of the messages to claim; None if there may be some after the pages that it looked at.
        Those that must wait for another of their key are put behind it."""
        for _ in range(PAGES):
            found = self._run(transaction, sql.CANDIDATES, None, target=target, limit=ROWS).all()
            counts = Counter(each.key for each in found if each.key is not None)
            blocked = (
                self._blocked(transaction, target, counts, {each.seq for each in found}) if counts else {}
            )
            free = [each for each in found if each.key not in blocked or each.seq < blocked[each.key][0]]
            behind = [
                each.seq
                for each in found
                if each.key in blocked and each.seq > blocked[each.key][0] and blocked[each.key][1] != "ready"
            ]
            if behind:
                self._change(transaction, sql.PUT_BEHIND, behind)
            if free or not behind:
                return _alone([(each.seq, each.lost) for each in free])
        return None

    def _blocked(
        self, transaction: DbTransaction, target: str, counts: Counter[str], ours: set[int]
    ) -> dict[str, tuple[int, str]]:
        """Return the first message of each key that is not ours, with its state, if it comes before one of
        ours."""
        first: dict[str, tuple[int, str]] = {}
        if self.dialect == "sqlite":
            run = transaction.connection.exec_driver_sql
            found: Iterable[Any] = (
                each
                for key, count in counts.items()
                for each in run(sql.FIRST_OF_KEY_SQLITE, (target, key, count))
            )
        else:
            values = {"target": target, "keys": list(counts), "counts": list(counts.values())}
            found = self._sql.run(transaction, sql.FIRST_OF_KEYS_POSTGRESQL, **values)
        for key, seq, state in found:
            if seq not in ours and (key not in first or seq < first[key][0]):
                first[key] = seq, state
        return first

    def _end(
        self,
        transaction: DbTransaction,
        claim: OutboxClaim,
        ending: Ending,
        uncount: bool,
        free_keys: list[str],
    ) -> int:
        token = claim.token
        changed = self._change(transaction, sql.PUBLISH, _seqs(ending.published), token=token)
        if changed:
            values: dict[str, Any] = {"target": claim.target, "messages": changed}
            self._sql.run(transaction, sql.TALLY_PUBLISHED, **values)
        back = {"token": token, "uncount": int(uncount)}
        changed += self._change(transaction, sql.GIVE_BACK, _seqs(ending.returned), **back)
        for row, error, line, delay in ending.failed:
            values = {"seq": row.seq, "token": token, "error": error, "line": line, "delay": delay}
            changed += self._sql.changed(transaction, sql.BURY if delay is None else sql.FAIL, **values)
        self._unblock(transaction, claim.target, free_keys)
        return len(ending.published) + len(ending.failed) + len(ending.returned) - changed

    def _unblock(self, transaction: DbTransaction, target: str, keys: list[str]) -> None:
        if not keys:
            return
        if self.dialect == "sqlite":
            values = [(target, key, UNBLOCKED) for key in keys]
            transaction.connection.exec_driver_sql(sql.UNBLOCK_KEY_SQLITE, values)
        else:
            given = {"target": target, "keys": keys, "limit": UNBLOCKED}
            following = self._find(transaction, sql.NEXT_OF_KEYS_POSTGRESQL, **given)
            self._change(transaction, sql.BRING_FORWARD, following)

    def _find(self, transaction: DbTransaction, statement: str, **values: Any) -> list[int]:
        return list(self._run(transaction, statement, None, **values).scalars())

    def _change(self, transaction: DbTransaction, statement: str, seqs: list[int], **values: Any) -> int:
        return 0 if seqs == [] else int(self._run(transaction, statement, seqs, **values).rowcount)

    def _run(self, transaction: DbTransaction, statement: str, seqs: list[int] | None, **values: Any) -> Any:
        full = statement.replace("{seqs}", sql.SEQS[self.dialect]).replace(
            "{skip}", sql.SKIP_LOCKED[self.dialect]
        )
        if seqs is not None:
            values["seqs"] = json.dumps(seqs) if self.dialect == "sqlite" else seqs
        return self._sql.run(transaction, full, **values)

    def _transact(self, operation: Callable[..., T], *args: Any, turn: bool = False) -> T:
        """With `turn`, wait for other relays to end theirs. On SQLite, every transaction is one."""

        def run(transaction: DbTransaction) -> T:
            if self.dialect == "postgresql":
                self._sql.run(
                    transaction, sql.LOCK_POSTGRESQL if turn else sql.BY_INDEX_POSTGRESQL, lock=LOCK
                )
            return operation(transaction, *args)

        return run_blocking(self._ports.transact(run))


def _seqs(rows: Iterable[Row]) -> list[int]:
    return [each.seq for each in rows]


def _alone(found: list[tuple[int, int]]) -> list[int]:
    """Let a suspect be alone, and others be without it."""
    suspects = [at for at, (_, lost) in enumerate(found) if lost >= SUSPECT]
    if not suspects:
        return [seq for seq, _ in found]
    return [seq for seq, _ in found[: max(suspects[0], 1)]]
