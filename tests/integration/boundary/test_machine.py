"""Boundary stores as state machines: any order of appends, reads, confirms, removals and restarts, against a model."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from onceward.boundary.errors import ConflictingDuplicate
from onceward.boundary.store import Bounds
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.boundary.wire import stored
from onceward.testing.boundary import fact
from tests.support.boundary.databases import StorePlace, shared_place

__all__ = ["shared_place"]

IDS = st.integers(0, 7).map(str)
CONTENT = st.sampled_from("xxy")
NAMES = st.sampled_from(["one", "two"])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.log: list[tuple[str, str] | None] = []
        """Id and content of each fact; None if it was removed."""
        self.cursors: dict[str, int] = {}

    async def opened(self) -> Any:
        return SqliteBoundaryStore(self.folder)

    def run(self, call: Any) -> Any:
        async def wait() -> Any:
            return await call

        return self.runner.run(wait())

    @initialize()
    def begin(self) -> None:
        self.store: Any = self.run(self.opened())

    def expected(self, id_: str, content: str) -> tuple[int, bool] | None:
        """Append to the model. None is a conflict."""
        for offset, known in enumerate(self.log, 1):
            if known is not None and known[0] == id_:
                return (offset, True) if known[1] == content else None
        self.log.append((id_, content))
        return len(self.log), False

    @rule(id_=IDS, content=CONTENT)
    def append(self, id_: str, content: str) -> None:
        expected = self.expected(id_, content)
        try:
            appended = self.run(self.store.append(fact(id_, content)))
        except ConflictingDuplicate:
            assert expected is None
        else:
            assert (appended.offset, appended.duplicate) == expected

    @rule(facts=st.lists(st.tuples(IDS, CONTENT), max_size=5))
    def append_all(self, facts: list[tuple[str, str]]) -> None:
        outcomes = self.run(self.store.append_all([fact(*each) for each in facts]))
        for each, outcome in zip(facts, outcomes, strict=True):
            expected = self.expected(*each)
            if isinstance(outcome, ConflictingDuplicate):
                assert expected is None
            else:
                assert (outcome.offset, outcome.duplicate) == expected

    @rule(name=NAMES, offset=st.integers(0, 20))
    def advance(self, name: str, offset: int) -> None:
        offset = min(offset, len(self.log))
        self.cursors[name] = max(self.cursors.get(name, 0), offset)
        assert self.run(self.store.advance(name, offset)) == self.cursors[name]

    @rule(name=NAMES)
    def register(self, name: str) -> None:
        assert self.run(self.store.position(name, create=True)) == self.cursors.setdefault(name, 0)

    @rule(through=st.integers(0, 6))
    def drop(self, through: int) -> None:
        present = sum(each is not None for each in self.log[:through])
        assert self.run(self.store.drop(through)) == present
        self.log[:through] = [None] * min(through, len(self.log))

    @rule()
    def restart(self) -> None:
        self.run(self.store.close())
        self.store = self.run(self.opened())

    @rule(after=st.integers(0, 20), limit=st.integers(1, 4))
    def read(self, after: int, limit: int) -> None:
        records = self.run(self.store.read(after, limit))
        there = [(offset, each[0]) for offset, each in enumerate(self.log, 1) if each and offset > after]
        assert [(each[0], stored(each).message_id) for each in records] == there[:limit]

    @invariant()
    def the_log_is_as_expected(self) -> None:
        there = [offset for offset, each in enumerate(self.log, 1) if each]
        first = there[0] if there else len(self.log) + 1
        assert self.run(self.store.bounds()) == Bounds(first, len(self.log))
        cursors = {each.name: each.offset for each in self.run(self.store.cursors())}
        assert cursors == self.cursors

    def teardown(self) -> None:
        if "store" in self.__dict__:
            self.run(self.store.close())
        self.runner.close()
        shutil.rmtree(self.folder)


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
def test_in_a_directory() -> None:
    machine: Any = StoreMachine
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=25))


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
def test_in_postgresql(shared_place: StorePlace) -> None:
    class OnPostgreSql(StoreMachine):
        def __init__(self) -> None:
            super().__init__()
            if shared_place.ask("SELECT to_regclass('onceward_boundary_facts')") != [(None,)]:
                shared_place.empty()

        async def opened(self) -> Any:
            from onceward.boundary.stores.postgresql.store import PostgreSqlBoundaryStore

            return await PostgreSqlBoundaryStore.open(shared_place.url)

    machine: Any = OnPostgreSql
    run_state_machine_as_test(machine, settings=settings(max_examples=6, stateful_step_count=20))
