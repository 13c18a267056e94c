"""Limits hold for everything that is written at the same time, by all servers of a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import pytest

from onceward.boundary.boundary import Boundary, BoundarySettings
from onceward.boundary.errors import (
    Aborted,
    Backpressure,
    ConflictingDuplicate,
    InvalidArgument,
    QuotaExceeded,
)
from onceward.boundary.model import Appended
from onceward.boundary.store import BoundaryStore, ObjectQuota
from onceward.boundary.wire import AROUND_RECORD
from onceward.testing.boundary.suite import StoreSuite, fact, with_store

WITHIN = 300_000
CONTENT = "x" * 10_000
PIECE = 10_000

T = TypeVar("T")


class LimitCases(StoreSuite):
    @asynccontextmanager
    async def servers(self) -> AsyncIterator[Sequence[BoundaryStore]]:
        """Two stores at one place, or one if it cannot be shared."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.store()) for _ in range(2 if self.is_shared else 1)]

    @pytest.mark.req("BC-24", "BC-26", "BC-36")
    def test_facts_appended_at_once_do_not_exceed_the_room_together(self) -> None:
        async def main() -> None:
            async with self.servers() as stores:
                facts = [fact(f"m{number}", CONTENT, within=WITHIN) for number in range(100)]
                outcomes = await _gather(stores[n % len(stores)].append(each) for n, each in enumerate(facts))
                appended = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Appended)]
                refused = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Backpressure)]
                assert len(appended) + len(refused) == 100
                assert 20 <= len(appended) <= 30
                assert await stores[0].size() <= WITHIN
                assert (await stores[0].bounds()).last == len(appended)

                # What is there has its offset, also while there is no room.
                for store in stores:
                    known = await store.append(facts[appended[0]])
                    assert known == Appended(outcomes[appended[0]].offset, duplicate=True)
                    assert await store.append_all([facts[appended[0]]]) == [known]
                    with pytest.raises(ConflictingDuplicate):
                        await store.append(fact(f"m{appended[0]}", "other", within=WITHIN))
                    with pytest.raises(Backpressure):
                        await store.append(facts[refused[0]])

                await stores[0].drop(len(appended))
                again = await stores[-1].append(facts[refused[0]])
                assert again == Appended(len(appended) + 1)

        asyncio.run(main())

    @pytest.mark.req("BC-26", "BC-36")
    @with_store
    async def test_of_many_facts_in_order_the_first_ones_have_room(self, store: BoundaryStore) -> None:
        known = fact("known", CONTENT, within=WITHIN)
        await store.append(known)
        large = [fact(f"m{number}", CONTENT, within=WITHIN) for number in range(60)]
        found = await store.append_all([*large, known, fact("small", within=WITHIN)])
        last = (await store.bounds()).last
        assert 20 <= last <= 30
        assert found[: last - 1] == [Appended(n) for n in range(2, last + 1)]
        assert [type(each) for each in found[last - 1 : 60]] == [Backpressure] * (61 - last)
        assert found[60] == Appended(1, duplicate=True), "what is there has its offset"
        assert isinstance(found[61], Backpressure), "none is written behind one that has no room"
        outcomes = await store.append_all([*large[: last - 1], known])
        assert outcomes == [Appended(n, duplicate=True) for n in [*range(2, last + 1), 1]]

    @pytest.mark.req("BC-26", "BC-53")
    @with_store
    async def test_each_of_several_facts_has_its_own_outcome(self, store: BoundaryStore) -> None:
        boundary = Boundary(store, BoundarySettings(capacity_bytes=WITHIN, backpressure_at=1.0))
        small = [fact(f"m{number}", CONTENT, within=WITHIN) for number in range(60)]
        huge = fact("huge", "x" * WITHIN, within=WITHIN)
        given = [small[0], huge, small[1], small[0], fact("m0", "other", within=WITHIN), huge, small[2]]
        outcomes = await boundary.append_each(given)
        kinds = [
            Appended,
            InvalidArgument,
            Appended,
            Appended,
            ConflictingDuplicate,
            InvalidArgument,
            Appended,
        ]
        assert [type(each) for each in outcomes] == kinds
        assert outcomes[3] == Appended(1, duplicate=True), "identical ones are one"
        assert [each.offset for each in outcomes if isinstance(each, Appended)] == [1, 2, 1, 3]
        outcomes = await boundary.append_each([small[3], huge, small[4], small[0]], in_order=True)
        assert [type(each) for each in outcomes] == [Appended, InvalidArgument, Aborted, Aborted]
        outcomes = await boundary.append_each([*small[5:], small[0]])
        last = (await store.bounds()).last
        written = [Appended(offset) for offset in range(5, last + 1)]
        assert outcomes[: len(written)] == written
        assert {type(each) for each in outcomes[len(written) : -1]} == {Backpressure}
        assert outcomes[-1] == Appended(1, duplicate=True), "also without room"
        assert await boundary.append_each([]) == []

    @pytest.mark.req("BC-26", "BC-37")
    @with_store
    async def test_a_page_has_no_more_bytes_than_asked_for(self, store: BoundaryStore) -> None:
        for number in range(4):
            await store.append(fact(f"m{number}", CONTENT))
        size = len((await store.read(0, 1))[0][1]) + AROUND_RECORD
        assert [each[0] for each in await store.read(0, 100, 3 * size)] == [1, 2, 3]
        assert [each[0] for each in await store.read(0, 100, 3 * size - 1)] == [1, 2]
        assert [each[0] for each in await store.read(2, 100, 1)] == [3], "one is never too large"

    @pytest.mark.req("BC-26", "BC-38")
    def test_names_registered_at_once_do_not_exceed_their_number(self) -> None:
        async def main() -> None:
            async with self.servers() as stores:
                names = [f"c{number}" for number in range(20)]
                outcomes = await _gather(
                    stores[n % len(stores)].position(name, create=True, most=8)
                    for n, name in enumerate(names)
                )
                known = [each.name for each in await stores[0].cursors()]
                assert 7 <= len(known) <= 8, "two that come last at once may both be refused"
                assert known == sorted(n for n, o in zip(names, outcomes, strict=True) if o == 0)
                assert sum(isinstance(outcome, QuotaExceeded) for outcome in outcomes) == 20 - len(known)
                assert await stores[0].position(known[0], create=True, most=1) == 0, "a known name is fine"

        asyncio.run(main())

    @pytest.mark.req("BC-26", "BC-38")
    @with_store
    async def test_a_removed_name_makes_room_and_starts_again(self, store: BoundaryStore) -> None:
        await store.append(fact("m1"))
        await store.advance("old", 1)
        with pytest.raises(QuotaExceeded, match="'new' cannot be registered: there are 1 consumers"):
            await store.position("new", create=True, most=1)
        assert await store.remove("old") == 1
        assert await store.remove("old") is None
        assert await store.position("old", create=False) is None
        assert await store.position("new", create=True, most=1) == 0
        assert [each.name for each in await store.cursors()] == ["new"]
        assert await store.position("old", create=True) == 0

    @pytest.mark.req("BC-26", "BC-40")
    def test_objects_put_at_once_do_not_exceed_their_bytes_together(self) -> None:
        async def main() -> None:
            async with self.servers() as stores:
                quota = ObjectQuota(size=20 * PIECE)
                outcomes = await _gather(
                    stores[n % len(stores)].objects.put("b", f"k{n}", _pieces(n, 6), "", quota)
                    for n in range(12)
                )
                kept = [each.key async for each in stores[0].objects.refs()]
                assert 0 < len(kept) <= 2 + len(stores), "each server more may exceed it by one piece"
                assert sum(isinstance(outcome, QuotaExceeded) for outcome in outcomes) == 12 - len(kept)
                number = int(kept[0].removeprefix("k"))
                again = await stores[0].objects.put("b", kept[0], _pieces(number, 6), "", quota)
                assert again.key == kept[0], "the same again needs no room"
                await stores[-1].objects.put("b", "small", _pieces(99, 1), "", quota)

        asyncio.run(main())

    @pytest.mark.req("BC-26", "BC-40")
    @with_store
    async def test_objects_put_at_once_do_not_exceed_their_number(self, store: BoundaryStore) -> None:
        quota = ObjectQuota(count=3)
        outcomes = await _gather(store.objects.put("b", f"k{n}", _pieces(n, 1), "", quota) for n in range(9))
        assert len([each async for each in store.objects.refs()]) == 3
        assert sum(isinstance(outcome, QuotaExceeded) for outcome in outcomes) == 6

    @pytest.mark.req("BC-40")
    def test_objects_of_an_earlier_time_count(self) -> None:
        async def put(store: BoundaryStore) -> None:
            await store.objects.put("b", "old", _pieces(1, 6), "")

        async def put_more(store: BoundaryStore) -> None:
            with pytest.raises(QuotaExceeded, match="raise `object_bytes`"):
                await store.objects.put("b", "new", _pieces(2, 6), "", ObjectQuota(size=10 * PIECE))
            with pytest.raises(QuotaExceeded, match="raise `objects`"):
                await store.objects.put("b", "new", _pieces(2, 1), "", ObjectQuota(count=1))
            assert await store.objects.head("b", "new") is None

        self.on_store(put)
        self.on_store(put_more)


async def _gather(calls: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[return-value]


async def _pieces(number: int, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        await asyncio.sleep(0)
        yield bytes([number]) * PIECE
