"""Removes expired facts from a stream.

JetStream can remove everything before a sequence in one step, and single messages. It cannot find the old facts of a
class. So the log is read in blocks, and the oldest facts of each block are remembered: the next run reads only blocks
in which something has expired.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import takewhile

import msgspec

from onceward.boundary.store import Bounds
from onceward.boundary.stores.jetstream.connection import JetStreamConnection

CLASS, APPENDED_AT = "Onceward-Class", "Onceward-Appended-At"
"""Headers of a fact."""

BLOCK = 1000
"""Offsets."""
LARGEST_PAGE_BYTES = 8 * 1024 * 1024
REMOVED_AT_ONCE = 100


class Age(msgspec.Struct, frozen=True):
    offset: int
    stream: str
    appended_at: int

    def is_over(self, older_than: Mapping[str, int]) -> bool:
        return self.appended_at < older_than.get(self.stream, 0)


class Expiry:
    def __init__(self, link: JetStreamConnection, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._oldest: dict[int, list[Age]] = {}
        """The oldest fact of each class, for each full block."""

    async def run(self, older_than: Mapping[str, int], bounds: Bounds, at_most: int | None = None) -> int:
        """Remove expired facts, `at_most` so many. Return how many."""
        blocks = range((bounds.first - 1) // BLOCK, (bounds.last - 1) // BLOCK + 1)
        self._oldest = {block: oldest for block, oldest in self._oldest.items() if block in blocks}
        removed, any_left = 0, False
        for block in blocks:
            left = self._oldest.get(block)
            if left is None or any(age.is_over(older_than) for age in left):
                ages, full = await self._read(block)
                over = [age for age in ages if age.is_over(older_than)]
                going = set(over if at_most is None else over[: max(at_most - removed, 0)])
                left = [age for age in ages if age not in going]
                removed += await self._remove(ages, going, from_start=not any_left)
                if full:
                    self._oldest[block] = list(_oldest(left).values())
            any_left = any_left or bool(left)
        return removed

    async def _read(self, block: int) -> tuple[list[Age], bool]:
        """Return the block's facts, and whether it is full: no more can be added."""
        ages: list[Age] = []
        after, end = block * BLOCK, (block + 1) * BLOCK
        while after < end:
            page = await self._link.page(self._stream, after, BLOCK, largest=LARGEST_PAGE_BYTES)
            if not page:
                break
            for headers in (message.headers or {} for message in page):
                after = int(headers["Nats-Sequence"])
                ages.append(Age(after, headers[CLASS], int(headers[APPENDED_AT])))
        return [age for age in ages if age.offset <= end], after >= end

    async def _remove(self, ages: list[Age], going: set[Age], *, from_start: bool) -> int:
        """Remove all before the first that stays in one step, if nothing before this block stays; others one by one."""
        prefix = list(takewhile(going.__contains__, ages)) if from_start else []
        removed = await self._link.purge(self._stream, seq=prefix[-1].offset + 1) if prefix else 0
        single = [age.offset for age in ages[len(prefix) :] if age in going]
        for at in range(0, len(single), REMOVED_AT_ONCE):
            some = single[at : at + REMOVED_AT_ONCE]
            removed += sum(await asyncio.gather(*(self._link.delete(self._stream, each) for each in some)))
        return removed


def _oldest(ages: list[Age]) -> dict[str, Age]:
    oldest: dict[str, Age] = {}
    for age in ages:
        known = oldest.setdefault(age.stream, age)
        if age.appended_at < known.appended_at:
            oldest[age.stream] = age
    return oldest
