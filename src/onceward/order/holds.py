"""Keys that dead letters hold, in the app's database, and what waits behind them.

A letter holds its key while it is open or redriven. What waits is in the source; consumers note here how much, so the
commands can show it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from onceward._ids import same_id
from onceward.db.transaction import DbTransaction
from onceward.storage.database import Sql, StoragePorts
from onceward.transaction import Transaction


class Holder(msgspec.Struct, frozen=True):
    """A dead letter that holds its key."""

    id: int
    order_key: str
    message_id: str
    seconds: float
    """For how long it is dead."""


class HeldKeys(msgspec.Struct):
    """The keys of a consumer that are held, when this was read."""

    holders: Mapping[str, Sequence[Holder]]
    letters: int

    def holder_of(self, key: str, transaction: Transaction) -> Holder | None:
        """The letter that an event has to wait for: any of its key; if it is one itself, only an older one."""
        found = self.holders.get(key)
        if found is None:
            return None
        own = same_id(transaction.id)
        mine = [each.id for each in found if each.message_id == own]
        others = [each for each in found if each.message_id != own and (not mine or each.id < min(mine))]
        return others[0] if others else None

    def is_letter(self, key: str, transaction: Transaction) -> bool:
        """Whether the event is itself a letter that holds its key."""
        own = same_id(transaction.id)
        return any(each.message_id == own for each in self.holders.get(key, ()))


NOTHING_HELD = HeldKeys({}, 0)


class HoldReader:
    """Reads and notes them, for threads and asyncio."""

    def __init__(
        self, ports: StoragePorts, consumer_id: str, most: int, clock: Callable[[], float] | None = None
    ) -> None:
        self._ports = ports
        self._rows = Sql(ports.dialect.name, clock)
        self._consumer = consumer_id
        self._most = most
        self._glance = ports.glance(f"SELECT 1 {_OF_CONSUMER} LIMIT 1", {"consumer": consumer_id})

    async def read(self) -> HeldKeys:
        """The oldest letters that hold a key; a few more than may be, and not all of them."""
        if self._glance is not None:  # this is asked for every fetch, and usually there are none
            self._ports.check_database()
            if self._glance.finds() is False:
                return NOTHING_HELD

        def read(connection: Any) -> list[Any]:
            values = {"consumer": self._consumer, "most": 2 * self._most}
            return list(self._rows.on(connection, _HOLDERS, **values).mappings())

        found = await self._ports.outside(read)
        if not found:
            return NOTHING_HELD
        holders: dict[str, list[Holder]] = {}
        for row in found:
            holders.setdefault(row["order_key"], []).append(msgspec.convert(dict(row), Holder, strict=False))
        return HeldKeys(holders, len(found))

    async def note(self, behind: Mapping[str, Any]) -> None:
        """Note what waits behind the letters of these keys, and forget all other keys."""

        def note(transaction: DbTransaction) -> None:
            self._rows.run(transaction, _FORGET, consumer=self._consumer)
            for key, line in behind.items():
                values = {"key": key, "waiting": line.waiting, "ids": json.dumps(line.ids)}
                self._rows.run(transaction, _NOTE, consumer=self._consumer, **values)

        await self._ports.transact(note)


class HeldLine(msgspec.Struct):
    """A key that dead letters hold, for people."""

    order_key: str
    letter: int
    """The first of them."""
    letters: int
    died_at: float
    """When the first one did, in seconds since 1970."""
    waiting: int | None
    """Events behind it, as its consumer last noted; None if it has noted nothing."""


def read_lines(connection: Connection, rows: Sql, consumer: str, most: int) -> list[HeldLine]:
    """The keys of a consumer that dead letters hold, the oldest first."""
    found = rows.on(connection, _LINES, consumer=consumer, most=most).mappings()
    return [msgspec.convert(dict(row), HeldLine, strict=False) for row in found]


_OF_CONSUMER = """
    FROM onceward_dead_letters
    WHERE consumer = :consumer AND order_key IS NOT NULL AND status IN ('open', 'redriven')
"""
_LINES = f"""
    SELECT order_key, min(id) AS letter, count(*) AS letters, min(died_at) AS died_at,
        (SELECT waiting FROM onceward_held_keys AS k
            WHERE k.consumer = :consumer AND k.order_key = onceward_dead_letters.order_key) AS waiting
    {_OF_CONSUMER}
    GROUP BY order_key ORDER BY min(id) LIMIT :most
"""
_HOLDERS = f"""
    SELECT id, order_key, message_id, {{now}} - died_at AS seconds {_OF_CONSUMER}
    ORDER BY id LIMIT :most
"""
_FORGET = "DELETE FROM onceward_held_keys WHERE consumer = :consumer"
_NOTE = """
    INSERT INTO onceward_held_keys (consumer, order_key, waiting, message_ids, noted_at)
    VALUES (:consumer, :key, :waiting, :ids, {now})
    ON CONFLICT (consumer, order_key) DO UPDATE SET
        waiting = excluded.waiting, message_ids = excluded.message_ids, noted_at = excluded.noted_at
"""
