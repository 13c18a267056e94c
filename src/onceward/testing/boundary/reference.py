"""Random appends, fetches, confirms, drops, crashes and restarts, compared with a trivial reference model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onceward.boundary.boundary import Boundary
from onceward.boundary.errors import ConflictingDuplicate, OffsetOutOfRange
from onceward.boundary.model import Envelope, Fact
from onceward.boundary.store import BoundaryStore
from onceward.boundary.wire import stored
from onceward.testing.boundary.suite import StoreSuite

IDS = st.integers(0, 9).map(str)
NAMES = st.sampled_from(["c1", "c2"])

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), IDS, st.sampled_from("xy")),
        st.tuples(st.just("append_many"), st.lists(st.tuples(IDS, st.sampled_from("xxxy")), max_size=8)),
        st.tuples(st.just("fetch"), NAMES, st.integers(1, 5)),
        st.tuples(st.just("confirm"), NAMES, st.integers(0, 12)),
        st.tuples(st.just("drop"), st.integers(0, 12)),
        st.tuples(st.just("expire")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("crash")),
    ),
    max_size=25,
)


class BoundaryModel:
    """A boundary as a list of facts and a dict of cursors."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str] | None] = []  # None: removed
        self.cursors: dict[str, int] = {}
        self.gone_before: dict[str, set[int]] = {}
        """Offsets that were missing already when each name was registered."""

    def append(self, name: str, content: str) -> tuple[int, bool] | None:
        for offset, known in enumerate(self.log, 1):
            if known is not None and known[0] == name:
                return (offset, True) if known[1] == content else None
        self.log.append((name, content))
        return len(self.log), False

    def fetch(self, name: str, limit: int) -> tuple[list[int], tuple[int, int] | None]:
        here = [offset for offset, known in enumerate(self.log, 1) if known]
        position = self.cursors.setdefault(name, here[0] - 1 if here else len(self.log))
        gone_before = self.gone_before.setdefault(name, set(range(1, len(self.log) + 1)).difference(here))
        there = [offset for offset, known in enumerate(self.log, 1) if known and offset > position]
        first = there[0] if there else len(self.log) + 1
        missed = sorted(set(range(position + 1, first)) - gone_before)
        unbroken = [offset for number, offset in enumerate(there[:limit], first) if offset == number]
        return unbroken, (missed[0], missed[-1]) if missed else None

    def confirm(self, name: str, offset: int) -> int | None:
        if offset > len(self.log):
            return None
        self.cursors[name] = max(self.cursors[name], offset)
        return self.cursors[name]

    def drop(self, through: int) -> None:
        for at in range(min(through, len(self.log))):
            self.log[at] = None

    def expire(self) -> None:
        self.log = [None if known is not None and is_short_lived(known[0]) else known for known in self.log]


def is_short_lived(message_id: str) -> bool:
    return int(message_id) % 3 == 0


class ModelCases(StoreSuite):
    async def crash(self, store: BoundaryStore) -> BoundaryStore:
        """Open the store again without an orderly close. By default it is closed first; override it if you can."""
        await store.close()
        return await self.open()

    async def fresh(self) -> BoundaryStore:
        """An empty store, for one of many examples in a test."""
        raise NotImplementedError

    @pytest.mark.req("BC-01", "BC-02", "BC-03", "BC-15", "BC-16", "BC-26")
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=STEPS)
    def test_whatever_happens_it_does_what_the_model_does(self, steps: list[Any]) -> None:
        asyncio.run(self._follow(steps))

    async def _follow(self, steps: list[Any]) -> None:
        store, model = await self.fresh(), BoundaryModel()
        try:
            for step in steps:
                match step:
                    case ("restart",):
                        await store.close()
                        store = await self.open()
                    case ("crash",):
                        store = await self.crash(store)
                    case ("drop", through):
                        await store.drop(through)
                        model.drop(through)
                    case ("expire",):
                        await store.expire({"documents": 2**53})
                        model.expire()
                    case _:
                        await self._compare(Boundary(store), model, step)
            await self._compare_whole(store, model)
        finally:
            await store.close()

    async def _compare(self, boundary: Boundary, model: BoundaryModel, step: Any) -> None:
        match step:
            case ("append", name, content):
                assert await _append(boundary, name, content) == model.append(name, content)
            case ("append_many", pairs):
                pairs = list({name: (name, content) for name, content in pairs}.values())
                outcomes = await asyncio.gather(*(_append(boundary, *pair) for pair in pairs))
                # The store may choose their order, but no two may share an offset.
                order = sorted(range(len(pairs)), key=lambda at: (outcomes[at] or (0, False))[0])
                for at in order:
                    assert outcomes[at] == model.append(*pairs[at])
            case ("fetch", name, limit):
                records, gap = await boundary.fetch(name, limit)
                missing = None if gap is None else (gap.first_missing, gap.last_missing)
                assert ([record[0] for record in records], missing) == model.fetch(name, limit)
            case ("confirm", name, offset):
                model.fetch(name, 1)
                await boundary.fetch(name, 1)
                assert await _confirm(boundary, name, offset) == model.confirm(name, offset)

    async def _compare_whole(self, store: BoundaryStore, model: BoundaryModel) -> None:
        records = [stored(each) for each in await store.read(0, 1000)]
        assert [(each.offset, each.message_id, each.fact.object) for each in records] == [
            (offset, *known) for offset, known in enumerate(model.log, 1) if known is not None
        ]
        assert {each.name: each.offset for each in await store.cursors()} == model.cursors


async def _append(boundary: Boundary, name: str, content: str) -> tuple[int, bool] | None:
    labels = {"retention": "documents"} if is_short_lived(name) else {}
    envelope = Envelope(message_id=name, from_zone="a", to_zone="b", produced_at_unix_ms=1, labels=labels)
    try:
        done = await boundary.append(
            envelope, Fact(subject="batch:B1", predicate="done", object_json=f'"{content}"')
        )
    except ConflictingDuplicate:
        return None
    return done.offset, done.duplicate


async def _confirm(boundary: Boundary, name: str, offset: int) -> int | None:
    try:
        return await boundary.confirm(name, offset)
    except OffsetOutOfRange:
        return None
