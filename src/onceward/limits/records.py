"""What limits count, in the app's database: when the next start of each key may be, and its slots under leases.

A start is given out for an exact time, at most `AHEAD` seconds before it, and two times of one key are never closer
than the rate allows. So no start is lost while a process sleeps, and there is no burst after an idle time. All times
are of the database: the clocks of the processes do not matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor
from typing import Any, Final

import msgspec

from onceward._ids import new_id
from onceward.db.transaction import DbTransaction
from onceward.limits.limit import Limit
from onceward.storage.database import Sql, StoragePorts

AHEAD: Final = 1.0
"""Seconds before its time that a start is given out, at most."""
AHEAD_WITH_SLOT: Final = 0.1
"""The same, if it holds a slot until then."""
LEASE: Final = 15.0
"""Seconds after which the slot of a silent process is free."""
IDLE: Final = 600.0
"""Seconds after which the row of a key without slots is removed."""
LONGEST_RETURN: Final = 600.0
"""Seconds until a message that was given back comes again, at most."""
UNKNOWN: Final = 0.1
"""Seconds that a handler is expected to take until one has."""
SPARES: Final = 2
"""How many messages that were given back come again for each start that may be expected."""


class Grant(msgspec.Struct):
    """Permission for one start."""

    key: str
    due_in: float
    """Seconds until it may start, when it was given."""
    due_at: float
    """The same as a time of the database."""
    token: str | None
    """Of its slot; None if handlers are not limited."""


class KeyState(msgspec.Struct):
    """What a request found out about one key."""

    grants: list[Grant]
    next_in: float
    """Seconds until the next start by its rate."""
    full: bool
    """Whether all slots are taken."""
    pace: float
    """Seconds from one start to the next, as far as known."""
    returns: list[float]
    """In how many seconds each message that is given back comes again."""


class KeyRow(msgspec.Struct):
    next_at: float
    tail: float
    held_for: float | None = None
    busy: int = 0


class Wish(msgspec.Struct):
    """What a process wants of one key."""

    starts: int
    keeps: int
    """How many of those that get no start it keeps waiting, if that is how fast the key is."""


class LimitRecords:
    """The records of one consumer, for threads and asyncio. Each method is one transaction."""

    def __init__(
        self,
        ports: StoragePorts,
        scope: str,
        limit: Limit,
        owner: str | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.ports = ports
        self._rows = Sql(ports.dialect.name, clock)
        self._keys = _KEYS[ports.dialect.name]
        self._scope, self._limit, self._owner = scope, limit, owner
        self._own = limit.every, limit.concurrency or 0
        self._known = self._own
        self.exact = False
        """Whether starts are given out only when their time has come."""

    @property
    def rated(self) -> bool:
        """Whether starts have a rate, as far as known."""
        return self._known[0] > 0

    @property
    def hands_over(self) -> bool:
        """Whether a slot may go from one message to the next without asking: nothing else is limited, and a process
        that began later has not changed the limit."""
        return not self.rated and self._known == self._own

    @property
    def ahead(self) -> float:
        """Seconds before its time that a start is given out."""
        return 0.0 if self.exact else ahead_of(*self._known)

    @property
    def pace(self) -> float:
        """Seconds from one start to the next, before anything is known of a key."""
        every, most = self._known
        return max(every, UNKNOWN / most if most else 0.0)

    @property
    def most(self) -> int:
        """How many handlers of a key run at once; 0 if that is not limited."""
        return self._known[1]

    async def begin(self) -> None:
        """Say what the limit is, for all processes. Those that began earlier go by it from now on."""
        limit = self._limit

        def begin(transaction: DbTransaction) -> None:
            by = "" if limit.by is None else limit.key_name
            values = {"every": limit.every, "concurrency": limit.concurrency or 0, "by": by}
            if self._rows.changed(transaction, _DECLARE, scope=self._scope, **values):
                self._rows.run(transaction, _FORGET_TAILS, scope=self._scope)
            now = self._rows.steady(transaction)
            self._rows.run(transaction, _REMOVE_IDLE, scope=self._scope, before=now - IDLE, now=now)

        await self.ports.transact(begin)

    async def take(
        self, wishes: Mapping[str, Wish], room: int, freed: Mapping[str, float | None]
    ) -> dict[str, KeyState]:
        """Give out starts for these keys, in this order, at most `room`; first free the slots with these tokens.

        What it cannot have now and does not keep is given back, to come again at the times in the answer.
        """

        def take(transaction: DbTransaction) -> dict[str, KeyState]:
            took = self._remove(transaction, freed)
            every, most = self._current(transaction)
            rows = self._lock(transaction, {*wishes, *took})
            self._learn(transaction, took)
            now = self._rows.steady(transaction)  # after the wait for the locks
            if most:
                keys = json.dumps(list(wishes))
                # Removed, not only left out: a renewal that began before the end of its lease must not find it.
                self._run(transaction, _EXPIRE, keys=keys, now=now, latest=now + 2 * (AHEAD + LEASE))
                for key, count in self._run(transaction, _BUSY, keys=keys).all():
                    rows[key].busy = count
            left, states, before = room, {}, {key: row.next_at for key, row in rows.items()}
            for key, wish in wishes.items():
                states[key] = _decide(key, rows[key], wish, now, every, most, self.ahead, left)
                left -= len(states[key].grants)
            slots = [
                {
                    "token": grant.token,
                    "scope": self._scope,
                    "key": grant.key,
                    "owner": self._owner,
                    "until": now + grant.due_in + LEASE,
                }
                for state in states.values()
                for grant in state.grants
                if grant.token is not None
            ]
            self._rows.many(transaction, _TAKE_SLOT, slots)
            changed = [
                key
                for key, state in states.items()
                if state.grants or state.returns or rows[key].next_at < before[key]
            ]
            self._rows.many(
                transaction,
                _UPDATE,
                [
                    {"scope": self._scope, "key": key, "next_at": rows[key].next_at, "tail": rows[key].tail}
                    for key in changed
                ],
            )
            return states

        return await self.ports.transact(take)

    async def renew(self, tokens: Sequence[str]) -> set[str]:
        """Extend the leases of slots. Returns the tokens that are still ours: one that has expired may be another's."""

        def renew(transaction: DbTransaction) -> set[str]:
            self._current(transaction)
            now = self._rows.steady(transaction)
            found = self._run(transaction, _RENEW, keys=json.dumps(tokens), now=now, until=now + LEASE)
            return set(found.scalars())

        return await self.ports.transact(renew)

    async def free(self, tokens: Mapping[str, float | None]) -> None:
        """Give slots back, each with the seconds that its handler took; None if it did not run."""

        def free(transaction: DbTransaction) -> None:
            self._learn(transaction, self._remove(transaction, tokens))

        await self.ports.transact(free)

    async def remove_idle(self) -> None:
        """Remove the rows of keys that nobody has used for a while."""

        def remove(transaction: DbTransaction) -> None:
            now = self._rows.steady(transaction)
            self._run(transaction, _REMOVE_IDLE, before=now - IDLE, now=now)

        await self.ports.transact(remove)

    def _remove(self, transaction: DbTransaction, freed: Mapping[str, float | None]) -> dict[str, float]:
        """Remove slots, and return how long a handler of each key took."""
        if not freed:
            return {}
        found = self._run(transaction, _FREE, keys=json.dumps(list(freed)))
        took = {key: freed[token] for token, key in found.all()}
        return {key: seconds for key, seconds in took.items() if seconds is not None}

    def _learn(self, transaction: DbTransaction, took: Mapping[str, float]) -> None:
        """Note how long handlers take."""
        values = [{"scope": self._scope, "key": key, "seconds": took[key]} for key in sorted(took)]
        self._rows.many(transaction, _LEARN, values)

    def _current(self, transaction: DbTransaction) -> tuple[float, int]:
        """What the limit is by now. The process that began last says it."""
        row = self._rows.first(transaction, _CURRENT, scope=self._scope)
        self._known = self._own if row is None else (float(row["every"]), int(row["concurrency"]))
        return self._known

    def _lock(self, transaction: DbTransaction, keys: set[str]) -> dict[str, KeyRow]:
        """Read the rows of these keys, and keep others from them until the end."""
        names, rows = json.dumps(sorted(keys)), dict[str, KeyRow]()
        while len(rows) < len(keys):  # one may be removed in between
            self._run(transaction, _INTRODUCE, keys=names)
            for key, *values in self._run(transaction, _LOCK + self._rows.for_update, keys=names).all():
                rows[key] = KeyRow(*values)
        return rows

    def _run(self, transaction: DbTransaction, sql: str, **values: Any) -> Any:
        return self._rows.run(transaction, sql.replace("{keys}", self._keys), scope=self._scope, **values)


def free_owner(transaction: DbTransaction, rows: Sql, owner: str) -> None:
    """Free the slots of a process that is known to be dead."""
    rows.run(transaction, _FREE_OWNER, owner=owner)


def _decide(
    key: str, row: KeyRow, wish: Wish, now: float, every: float, most: int, ahead: float, room: int
) -> KeyState:
    """Give out starts of one key, and change its row."""
    count = max(min(wish.starts, room), 0)
    full = False
    if most:
        free = max(most - row.busy, 0)
        full, count = free < wish.starts, min(count, free)
    first = now
    if every:
        # One that is further away than any start can be comes from a slower limit, or from another clock.
        first = min(max(row.next_at, now), now + AHEAD + every)
        count = min(count, floor((now + ahead - first) / every) + 1 if first <= now + ahead else 0)
        row.next_at = first + count * every
    times = [first + number * every for number in range(count)]
    grants = [Grant(key, due - now, due, new_id() if most else None) for due in times]
    took = UNKNOWN if row.held_for is None else row.held_for
    pace = max(every, took / most if most else 0.0)
    keeps = min(wish.keeps, max(1, ceil(AHEAD / pace))) if pace else wish.keeps
    returns = []
    tail = min(max(row.tail, now, row.next_at if every else now), now + LONGEST_RETURN)
    for _ in range(wish.starts - count - keeps):
        tail = min(tail + pace / SPARES, now + LONGEST_RETURN)
        returns.append(tail - now)
    if returns:
        row.tail = tail
    return KeyState(grants, row.next_at - now if every else 0.0, full, pace, returns)


def ahead_of(every: float, most: int) -> float:
    return AHEAD_WITH_SLOT if every and most else AHEAD


_KEYS = {
    "sqlite": "(SELECT value FROM json_each(:keys))",
    "postgresql": "(SELECT value FROM json_array_elements_text(CAST(:keys AS json)))",
}
_DECLARE = """
    INSERT INTO onceward_limits (scope, every, concurrency, by_what) VALUES (:scope, :every, :concurrency, :by)
    ON CONFLICT (scope) DO UPDATE SET every = excluded.every, concurrency = excluded.concurrency,
        by_what = excluded.by_what
    WHERE onceward_limits.every <> excluded.every OR onceward_limits.concurrency <> excluded.concurrency
        OR onceward_limits.by_what <> excluded.by_what
"""
_CURRENT = "SELECT every, concurrency FROM onceward_limits WHERE scope = :scope"
_FORGET_TAILS = "UPDATE onceward_limit_keys SET tail = 0 WHERE scope = :scope"
_INTRODUCE = """
    INSERT INTO onceward_limit_keys (scope, key, next_at, tail)
    SELECT :scope, value, 0, 0 FROM {keys} AS wanted WHERE true ORDER BY value ON CONFLICT DO NOTHING
"""
_LOCK = """
    SELECT key, next_at, tail, held_for FROM onceward_limit_keys
    WHERE scope = :scope AND key IN {keys} ORDER BY key
"""
_BUSY = """
    SELECT key, count(*) FROM onceward_limit_slots
    WHERE scope = :scope AND key IN {keys} GROUP BY key
"""
_EXPIRE = """
    DELETE FROM onceward_limit_slots
    WHERE scope = :scope AND key IN {keys} AND (held_until <= :now OR held_until > :latest)
"""
_TAKE_SLOT = """
    INSERT INTO onceward_limit_slots (token, scope, key, owner, held_until)
    VALUES (:token, :scope, :key, :owner, :until)
"""
_UPDATE = (
    "UPDATE onceward_limit_keys SET next_at = :next_at, tail = :tail WHERE scope = :scope AND key = :key"
)
_RENEW = """
    UPDATE onceward_limit_slots SET held_until = :until
    WHERE token IN {keys} AND scope = :scope AND held_until > :now RETURNING token
"""
_FREE = "DELETE FROM onceward_limit_slots WHERE token IN {keys} AND scope = :scope RETURNING token, key"
_FREE_OWNER = "DELETE FROM onceward_limit_slots WHERE owner = :owner"
_LEARN = """
    UPDATE onceward_limit_keys SET held_for = COALESCE(held_for * 0.8 + CAST(:seconds AS double precision) * 0.2,
        CAST(:seconds AS double precision))
    WHERE scope = :scope AND key = :key
"""
_REMOVE_IDLE = """
    DELETE FROM onceward_limit_keys WHERE scope = :scope AND next_at < :before AND tail < :before
        AND NOT EXISTS (SELECT 1 FROM onceward_limit_slots AS slot WHERE slot.scope = onceward_limit_keys.scope
            AND slot.key = onceward_limit_keys.key AND slot.held_until > :now)
"""
