"""Take over messages that were delivered but never acknowledged.

A sweep walks the group's pending list with a cursor, so fresh, undecodable and trimmed entries never block the
entries behind them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from onceward._process.stop import AsyncStop, BlockingStop
from onceward.queue.errors import QueueError, UndecodableEntryError
from onceward.queue.messages import QueueMessage
from onceward.queue.protocol import START, RedisGroup
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.queue"))

PAGE = 100
"""Pending entries inspected at a time if Redis cannot select them itself."""
SHOWN = 10
"""Ids of trimmed entries in one line of the log."""


class Claims:
    def __init__(self, group: RedisGroup, stop: BlockingStop | AsyncStop) -> None:
        self._group = group
        self._commands = group.commands
        self._stop = stop
        self._skips_own = group.config.claim_skip_own_messages
        self._own_name = group.config.consumer_name.encode()
        self._has_autoclaim = True
        self._left_unread: UndecodableEntryError | None = None

    async def claim(
        self, min_idle_ms: int, count: int, cursor: bytes = START
    ) -> tuple[list[QueueMessage], bytes]:
        """Return at most `count` stale messages from the cursor on, and the next cursor; `START` after the last one.

        Undecodable entries are raised as by `QueueCore.read`: by the next claim at the latest.
        """
        left, self._left_unread = self._left_unread, None
        if left is not None:
            raise left
        await self._group.create_once()
        found = self._group.entries()
        while len(found.messages) < count and not self._stop.requested:
            taken, cursor = await self._take(min_idle_ms, count - len(found.messages), cursor)
            for each in taken:
                found.add(*each)
            if cursor == START:
                break
        self._group.count_claimed(found)
        messages, left = found.result()
        if left is not None:
            self._left_unread = left
        return messages, cursor

    async def _take(self, min_idle_ms: int, count: int, cursor: bytes) -> tuple[list[_Taken], bytes]:
        if self._has_autoclaim and not self._skips_own:
            try:
                return await self._take_at_once(min_idle_ms, count, cursor)
            except QueueError as error:
                if not _is_unknown_command(error.cause):
                    raise
                self._has_autoclaim = False  # Redis before 6.2
        return await self._take_chosen(min_idle_ms, count, cursor)

    async def _take_at_once(self, min_idle_ms: int, count: int, cursor: bytes) -> tuple[list[_Taken], bytes]:
        [reply], _ = await self._group.ask(self._commands.autoclaim(min_idle_ms, cursor, count))
        # Redis 7 forgets trimmed entries, and lists them separately; 6.2 puts nil in their place, and keeps them.
        self._tell_forgotten(reply[2] if len(reply) > 2 else ())
        entries = [entry for entry in reply[1] if entry is not None and entry[1] is not None]
        if not entries:
            return [], reply[0]
        pages, _ = await self._group.ask(*(self._commands.pending(id_, id_, 1) for id_, _ in entries))
        deliveries = [page[0][3] if page else None for page in pages]
        taken = [_Taken(id_, fields, times) for (id_, fields), times in zip(entries, deliveries, strict=True)]
        return taken, reply[0]

    async def _take_chosen(self, min_idle_ms: int, count: int, cursor: bytes) -> tuple[list[_Taken], bytes]:
        [page], _ = await self._group.ask(self._commands.pending(cursor, "+", PAGE))
        chosen: dict[bytes, int] = {}
        seen = 0
        for id_, consumer, idle, deliveries in page:
            seen += 1
            if idle >= min_idle_ms and not (self._skips_own and consumer == self._own_name):
                chosen[id_] = deliveries + 1
                if len(chosen) == count:
                    break
        cursor = START if seen == len(page) < PAGE else _after(page[seen - 1][0])
        if not chosen:
            return [], cursor
        [entries], _ = await self._group.ask(self._commands.claim(min_idle_ms, list(chosen)))
        # Entries that another consumer claimed first are missing; trimmed ones are nil before Redis 7.
        taken = [_Taken(entry[0], entry[1], chosen[entry[0]]) for entry in entries if entry is not None]
        if len(entries) < len(chosen):
            missing = list(chosen.keys() - {each.id for each in taken})
            found, _ = await self._group.ask(*map(self._commands.entry, missing))
            self._tell_forgotten([id_ for id_, there in zip(missing, found, strict=True) if not there])
        return taken, cursor

    def _tell_forgotten(self, ids: Collection[bytes]) -> None:
        if ids:
            _log.warning(
                "%d entries of stream %s were trimmed before group %s acknowledged them, so nobody can handle them any "
                "more, and Redis has taken them off the pending list: %s%s",
                len(ids),
                self._group.config.stream_key,
                self._group.config.consumer_group,
                b", ".join(sorted(ids)[:SHOWN]).decode(),
                "" if len(ids) <= SHOWN else ", …",
            )


class _Taken(NamedTuple):
    id: bytes
    fields: list[bytes]
    deliveries: int | None


def _after(id_: bytes) -> bytes:
    """Return the smallest id that is greater."""
    milliseconds, number = id_.split(b"-")
    return b"%b-%d" % (milliseconds, int(number) + 1)


def _is_unknown_command(cause: Any) -> bool:
    return isinstance(cause, ResponseError) and "unknown command" in str(cause).lower()
