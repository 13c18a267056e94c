"""Appending and reading facts."""

from __future__ import annotations

import asyncio

import pytest

from onceward.boundary.errors import ConflictingDuplicate, Unavailable
from onceward.boundary.model import Appended
from onceward.boundary.store import BoundaryStore, Bounds
from onceward.boundary.wire import stored
from onceward.testing.boundary.suite import StoreSuite, fact, with_store


class FactCases(StoreSuite):
    @pytest.mark.req("BC-26")
    @with_store
    async def test_an_empty_log_has_its_first_offset_one_above_its_last(self, store: BoundaryStore) -> None:
        assert await store.bounds() == Bounds(1, 0)
        assert await store.read(0, 10) == []

    @pytest.mark.req("BC-26")
    @with_store
    async def test_offsets_begin_at_one_and_leave_none_out(self, store: BoundaryStore) -> None:
        appended = [await store.append(fact(f"m{number}")) for number in range(5)]
        assert [each.offset for each in appended] == [1, 2, 3, 4, 5]
        assert await store.bounds() == Bounds(1, 5)

    @pytest.mark.req("BC-26")
    @with_store
    async def test_what_was_appended_is_read_as_it_was(self, store: BoundaryStore) -> None:
        await store.append(fact("m1", "päckchen", appended_at=1_700_000_000_123))
        (record,) = await store.read(0, 10)
        read = stored(record)
        assert (read.offset, read.message_id, read.appended_at_unix_ms) == (1, "m1", 1_700_000_000_123)
        assert read.fact.object == "päckchen"

    @pytest.mark.req("BC-26")
    @with_store
    async def test_a_page_begins_after_an_offset_and_has_no_more_than_its_limit(
        self, store: BoundaryStore
    ) -> None:
        for number in range(1, 11):
            await store.append(fact(f"m{number}"))
        assert [each[0] for each in await store.read(3, 4)] == [4, 5, 6, 7]
        assert [each[0] for each in await store.read(8, 100)] == [9, 10]
        assert await store.read(10, 100) == []

    @pytest.mark.req("BC-26")
    @with_store
    async def test_the_times_of_the_first_facts_after_offsets_are_known_at_once(
        self, store: BoundaryStore
    ) -> None:
        assert await store.times_after([]) == []
        assert await store.times_after([0, 7]) == [None, None]
        for number in range(1, 5):
            await store.append(fact(f"m{number}", appended_at=1_700_000_000_000 + number))
        await store.drop(2)
        times = await store.times_after([3, 0, 4, 2])
        assert times == [1_700_000_000_004, 1_700_000_000_003, None, 1_700_000_000_003]

    @pytest.mark.req("BC-26")
    @with_store
    async def test_a_page_of_large_facts_is_cut_but_never_empty(self, store: BoundaryStore) -> None:
        for number in range(4):
            await store.append(fact(f"m{number}", "x" * 6_000_000))
        page = await store.read(0, 100)
        assert [each[0] for each in page] in ([1], [1, 2])

    @pytest.mark.req("BC-15", "BC-26")
    @with_store
    async def test_a_known_id_with_the_same_content_answers_its_first_offset(
        self, store: BoundaryStore
    ) -> None:
        assert await store.append(fact("m1", "x")) == Appended(1)
        await store.append(fact("m2"))
        assert await store.append(fact("m1", "x")) == Appended(1, duplicate=True)
        assert (await store.bounds()).last == 2

    @pytest.mark.req("BC-15", "BC-26")
    @with_store
    async def test_a_known_id_with_other_content_is_refused_with_the_first_offset(
        self, store: BoundaryStore
    ) -> None:
        await store.append(fact("m1", "x"))
        with pytest.raises(ConflictingDuplicate) as raised:
            await store.append(fact("m1", "y"))
        assert raised.value.original_offset == 1
        assert (await store.bounds()).last == 1

    @pytest.mark.req("BC-15", "BC-26")
    @with_store
    async def test_one_id_at_once_from_all_sides_is_one_fact(self, store: BoundaryStore) -> None:
        appended = await asyncio.gather(*(store.append(fact("m1", "x")) for _ in range(50)))
        assert {each.offset for each in appended} == {1}
        assert sum(not each.duplicate for each in appended) == 1
        assert (await store.bounds()).last == 1

    @pytest.mark.req("BC-15", "BC-26")
    @with_store
    async def test_of_one_id_at_once_with_different_contents_one_is_kept_and_the_others_are_refused(
        self, store: BoundaryStore
    ) -> None:
        outcomes = await asyncio.gather(
            *(store.append(fact("m1", str(number))) for number in range(20)), return_exceptions=True
        )
        assert sum(isinstance(each, Appended) for each in outcomes) == 1
        assert sum(isinstance(each, ConflictingDuplicate) for each in outcomes) == 19
        assert (await store.bounds()).last == 1

    @pytest.mark.req("BC-15", "BC-26")
    @with_store
    async def test_duplicates_and_conflicts_among_new_facts_take_no_offset(
        self, store: BoundaryStore
    ) -> None:
        await store.append(fact("known", "x"))
        outcomes = await asyncio.gather(
            *(store.append(fact(f"m{number}")) for number in range(10)),
            store.append(fact("known", "x")),
            store.append(fact("known", "y")),
            *(store.append(fact(f"n{number}")) for number in range(10)),
            return_exceptions=True,
        )
        assert isinstance(outcomes[11], ConflictingDuplicate)
        new = sorted(each.offset for each in outcomes if isinstance(each, Appended) and not each.duplicate)
        assert new == list(range(2, 22))

    @pytest.mark.req("BC-26")
    @with_store
    async def test_many_appended_in_order_get_offsets_in_that_order(self, store: BoundaryStore) -> None:
        await store.append(fact("known", "x"))
        given = [fact(f"m{number}") for number in range(1500)]
        given[700:700] = [fact("known", "x"), fact("known", "y"), fact("m3")]
        other, outcomes = await asyncio.gather(store.append(fact("beside")), store.append_all(given))
        new = [each.offset for each in outcomes if isinstance(each, Appended) and not each.duplicate]
        assert new == sorted(new)
        assert sorted([*new, other.offset]) == list(range(2, 1503))
        assert outcomes[700] == Appended(1, duplicate=True)
        assert isinstance(outcomes[701], ConflictingDuplicate)
        assert outcomes[702] == Appended(new[3], duplicate=True)
        assert await store.append_all([]) == []

    @pytest.mark.req("BC-16", "BC-26")
    @with_store
    async def test_a_fact_never_appears_below_an_offset_that_was_served(self, store: BoundaryStore) -> None:
        async def append(writer: int) -> None:
            for number in range(40):
                await store.append(fact(f"{writer}-{number}"))

        async def follow() -> list[int]:
            seen: list[int] = []
            while len(seen) < 320:
                seen += [each[0] for each in await store.read(seen[-1] if seen else 0, 7)]
                await asyncio.sleep(0)
            return seen

        seen, *_ = await asyncio.gather(follow(), *(append(writer) for writer in range(8)))
        assert seen == list(range(1, 321))

    @pytest.mark.req("BC-16", "BC-26")
    def test_what_was_answered_is_there_after_opening_again(self) -> None:
        async def write(store: BoundaryStore) -> None:
            await asyncio.gather(*(store.append(fact(f"m{number}", str(number))) for number in range(100)))

        async def read(store: BoundaryStore) -> None:
            records = await store.read(0, 1000)
            assert [each[0] for each in records] == list(range(1, 101))
            assert len({stored(each).message_id for each in records}) == 100
            assert await store.append(fact("m7", "7")) == Appended(
                next(each[0] for each in records if stored(each).message_id == "m7"), duplicate=True
            )
            assert (await store.append(fact("new"))).offset == 101

        self.on_store(write)
        self.on_store(read)

    @pytest.mark.req("BC-26")
    @with_store
    async def test_a_caller_who_goes_away_does_not_harm_those_beside_it(self, store: BoundaryStore) -> None:
        calls = [asyncio.create_task(store.append(fact(f"m{number}"))) for number in range(20)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for number in range(20):
            await store.append(fact(f"m{number}"))
        assert [each[0] for each in await store.read(0, 100)] == list(range(1, 21))

    @pytest.mark.req("BC-26")
    @with_store
    async def test_ids_may_be_any_text(self, store: BoundaryStore) -> None:
        ids = ["a.b.*.>", "ключ", "with blanks in it", "x" * 400, "'; DROP TABLE facts; --", "A", "a"]
        offsets = [(await store.append(fact(each))).offset for each in ids]
        assert offsets == list(range(1, len(ids) + 1))
        assert [stored(each).message_id for each in await store.read(0, 100)] == ids

    @pytest.mark.req("BC-26")
    @with_store
    async def test_a_closed_store_is_unavailable_and_closing_twice_is_fine(
        self, store: BoundaryStore
    ) -> None:
        await store.close()
        await store.close()
        with pytest.raises(Unavailable):
            await store.append(fact("m1"))
        with pytest.raises(Unavailable):
            await store.append_all([fact("m1")])
