"""Removing old facts."""

from __future__ import annotations

import asyncio

import pytest

from onceward._time import Moment
from onceward.boundary.boundary import Boundary
from onceward.boundary.model import Gap
from onceward.boundary.store import BoundaryStore, Bounds
from onceward.testing.boundary.suite import StoreSuite, fact, with_store


async def walk(boundary: Boundary, name: str) -> list[Gap]:
    """Read to the end, one fact at a time, and return the gaps that were reported."""
    gaps: list[Gap] = []
    while True:
        records, gap = await boundary.fetch(name, 1)
        gaps += [gap] if gap is not None else []
        if not records:
            return gaps
        await boundary.confirm(name, records[0][0])


class ExpiryCases(StoreSuite):
    @pytest.mark.req("BC-21", "BC-26")
    @with_store
    async def test_a_fact_expires_by_its_age_and_its_class(self, store: BoundaryStore) -> None:
        for number, stream in enumerate(["operational", "audit", "operational", "documents"], 1):
            await store.append(fact(f"m{number}", stream=stream, appended_at=1000 + number))
        assert await store.expire({"operational": 1003, "documents": 1003}) == 1
        assert [each[0] for each in await store.read(0, 10)] == [2, 3, 4]
        assert await store.expire({"operational": 1004, "audit": 1000}) == 1
        assert [each[0] for each in await store.read(0, 10)] == [2, 4]
        assert await store.bounds() == Bounds(2, 4)

    @pytest.mark.req("BC-26", "BC-52")
    @with_store
    async def test_no_more_expire_than_allowed_and_the_oldest_go_first(self, store: BoundaryStore) -> None:
        for number, stream in enumerate(["audit", *["operational"] * 4, "documents"], 1):
            await store.append(fact(f"m{number}", stream=stream, appended_at=1000 + number))
        every = {"operational": 2000, "audit": 2000, "documents": 2000}
        assert await store.expire({"operational": 2000}, at_most=2) == 2
        assert [each[0] for each in await store.read(0, 10)] == [1, 4, 5, 6]
        assert await store.expire(every, at_most=0) == 0
        assert await store.expire(every, at_most=3) == 3
        assert len(await store.read(0, 10)) == 1
        assert await store.expire(every, at_most=100) == 1

    @pytest.mark.req("BC-21", "BC-26", "BC-49")
    @with_store
    async def test_a_name_is_told_only_of_what_was_removed_after_it_was_registered(
        self, store: BoundaryStore
    ) -> None:
        boundary = Boundary(store)
        classes = ["audit", "documents", "documents", "audit", "operational", "documents", "audit", "audit"]
        for number, stream in enumerate(classes, 1):
            await store.append(fact(f"m{number}", stream=stream, appended_at=1000))
        await boundary.fetch("early", 10)
        await store.expire({"documents": 2000})  # 2, 3 and 6
        assert await walk(boundary, "early") == [Gap(2, 3), Gap(6, 6)]
        await boundary.fetch("late", 10)
        await boundary.confirm("late", 1)
        await store.expire({"operational": 2000})  # 5, beside the hole at 6
        assert await walk(boundary, "new") == []
        assert await walk(boundary, "late") == [Gap(5, 5)]
        await boundary.fetch("last", 10)
        await store.drop(4)
        assert await walk(boundary, "last") == [Gap(1, 4)]
        assert await walk(boundary, "newest") == []

    @pytest.mark.req("BC-21", "BC-26", "BC-49")
    def test_which_holes_a_name_has_met_is_kept_through_restarts(self) -> None:
        async def first(store: BoundaryStore) -> None:
            for number, stream in enumerate(["audit", "documents", "audit", "documents", "audit"], 1):
                await store.append(fact(f"m{number}", stream=stream, appended_at=1000 + number))
            await store.expire({"documents": 1003})
            await Boundary(store).register("c")

        async def again(store: BoundaryStore) -> None:
            await store.expire({"documents": 2000})
            await store.drop(1)
            assert await walk(Boundary(store), "c") == [Gap(1, 1), Gap(4, 4)]
            # All names have passed them; a number that is used again would hide a later hole.
            for number in range(6, 9):
                await store.append(fact(f"m{number}", stream="documents", appended_at=1000))
            await store.append(fact("m9", stream="audit", appended_at=1000))
            await store.expire({"documents": 2000})
            assert await walk(Boundary(store), "c") == [Gap(6, 8)]

        self.on_store(first)
        self.on_store(again)

    @pytest.mark.req("BC-26", "BC-51")
    def test_the_trusted_time_is_kept_and_can_be_set_back(self) -> None:
        async def first(store: BoundaryStore) -> None:
            assert await store.trusted_time() is None
            await store.trust_time(Moment(2000.5, "boot", 10.5))
            assert await store.trusted_time() == Moment(2000.5, "boot", 10.5)
            await store.trust_time(Moment(1000.0))

        async def again(store: BoundaryStore) -> None:
            assert await store.trusted_time() == Moment(1000.0)

        self.on_store(first)
        self.on_store(again)

    @pytest.mark.req("BC-21", "BC-26")
    def test_an_offset_is_not_used_again_though_all_facts_have_expired(self) -> None:
        async def first(store: BoundaryStore) -> None:
            for number in range(3):
                await store.append(fact(f"m{number}", appended_at=1000))
            assert await store.expire({"operational": 2000}) == 3
            assert await store.bounds() == Bounds(4, 3)

        async def again(store: BoundaryStore) -> None:
            assert await store.bounds() == Bounds(4, 3)
            assert (await store.append(fact("m0"))).offset == 4, "an expired id counts as new"
            assert await store.bounds() == Bounds(4, 4)

        self.on_store(first)
        self.on_store(again)

    @pytest.mark.req("BC-26")
    @with_store
    async def test_many_facts_expire_while_others_are_appended(self, store: BoundaryStore) -> None:
        await asyncio.gather(*(store.append(fact(f"old{n}", appended_at=1000)) for n in range(4500)))
        expiring = asyncio.create_task(store.expire({"operational": 2000}))
        appended = await asyncio.gather(*(store.append(fact(f"new{n}")) for n in range(50)))
        assert await expiring == 4500
        assert sorted(each.offset for each in appended) == list(range(4501, 4551))
        assert await store.bounds() == Bounds(4501, 4550)

    @pytest.mark.req("BC-26")
    @with_store
    async def test_facts_can_be_dropped_up_to_an_offset(self, store: BoundaryStore) -> None:
        for number in range(5):
            await store.append(fact(f"m{number}"))
        assert await store.drop(3) == 3
        assert await store.bounds() == Bounds(4, 5)
        assert await store.drop(3) == 0
        assert await store.drop(5) == 2
        assert await store.bounds() == Bounds(6, 5)

    @pytest.mark.req("BC-26")
    @with_store
    async def test_the_size_grows_with_facts(self, store: BoundaryStore) -> None:
        before = await store.size()
        await asyncio.gather(*(store.append(fact(f"m{number}", "x" * 10_000)) for number in range(100)))
        assert before + 500_000 < await store.size() < before + 5_000_000
