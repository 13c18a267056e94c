"""Cursors: names, progress, confirms at once, and restarts."""

from __future__ import annotations

import asyncio

import pytest

from onceward.boundary.boundary import Boundary
from onceward.boundary.store import BoundaryStore
from onceward.testing.boundary.suite import StoreSuite, fact, with_store


class CursorCases(StoreSuite):
    @pytest.mark.req("BC-02", "BC-26")
    @with_store
    async def test_a_name_is_made_known_only_if_asked(self, store: BoundaryStore) -> None:
        assert await store.position("c", create=False) is None
        assert await store.position("c", create=True) == 0
        assert await store.position("c", create=False) == 0
        assert [each.name for each in await store.cursors()] == ["c"]

    @pytest.mark.req("BC-26", "BC-49")
    @with_store
    async def test_a_name_can_be_made_known_at_an_offset_which_is_no_confirmation(
        self, store: BoundaryStore
    ) -> None:
        await _fill(store, 9)
        assert await store.position("c", create=True, start=4) == 4
        assert await store.position("c", create=True, start=7) == 4
        assert await store.position("c", create=False) == 4
        [cursor] = await store.cursors()
        assert (cursor.offset, cursor.confirmed_at_unix_ms) == (4, None)

    @pytest.mark.req("BC-02", "BC-26")
    @with_store
    async def test_names_are_independent_and_any_text(self, store: BoundaryStore) -> None:
        names = ["a.b.*.>", "имя", "plant a", "A", "a"]
        await _fill(store, len(names))
        for position, name in enumerate(names, 1):
            assert await store.advance(name, position) == position
        assert [await store.position(name, create=False) for name in names] == [1, 2, 3, 4, 5]
        assert sorted(each.name for each in await store.cursors()) == sorted(names)

    @pytest.mark.req("BC-03", "BC-26")
    @with_store
    async def test_a_cursor_never_goes_back(self, store: BoundaryStore) -> None:
        await _fill(store, 9)
        assert await store.advance("c", 7) == 7
        assert await store.advance("c", 3) == 7
        assert await store.advance("c", 7) == 7
        assert await store.advance("c", 9) == 9

    @pytest.mark.req("BC-03", "BC-26")
    @with_store
    async def test_of_confirms_at_once_the_highest_stays(self, store: BoundaryStore) -> None:
        await _fill(store, 20)
        answers = await asyncio.gather(*(store.advance("c", offset) for offset in range(20, 0, -1)))
        assert max(answers) == 20
        assert await store.position("c", create=False) == 20

    @pytest.mark.req("BC-60", "BC-26")
    @with_store
    async def test_what_is_read_while_a_cursor_moves_is_what_is_fetched_then(
        self, store: BoundaryStore
    ) -> None:
        boundary = Boundary(store)
        await _fill(store, 9)
        await boundary.fetch("c", 1)
        for offset, limit in ((2, 3), (5, 9), (9, 1)):
            _, ahead = await asyncio.gather(
                boundary.confirm("c", offset), boundary.read_ahead(offset, limit, 0)
            )
            assert ahead is not None
            assert await boundary.fetch("c", limit, 0, ahead) == await boundary.fetch("c", limit)
        beyond = await boundary.read_ahead(2**62, 9, 0)  # a confirmation of this is refused
        assert beyond is not None
        assert beyond.records == []
        assert await boundary.read_ahead(-1, 9, 0) is None

    @pytest.mark.req("BC-02", "BC-26")
    def test_cursors_are_there_after_opening_again(self) -> None:
        async def write(store: BoundaryStore) -> None:
            await _fill(store, 5)
            await store.position("new", create=True)
            await store.advance("old", 4)

        async def read(store: BoundaryStore) -> None:
            known = {each.name: each for each in await store.cursors()}
            assert {name: each.offset for name, each in known.items()} == {"new": 0, "old": 4}
            assert known["new"].confirmed_at_unix_ms is None
            assert known["old"].confirmed_at_unix_ms is not None

        self.on_store(write)
        self.on_store(read)


async def _fill(store: BoundaryStore, count: int) -> None:
    await asyncio.gather(*(store.append(fact(f"m{number}")) for number in range(count)))
