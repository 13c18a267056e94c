"""Dead letters as a state machine: buried, sent again, leased, fenced and settled in any order, compared with a model.

This is the storage with claims, leases and fences that others, such as an outbox, would need.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from onceward.deadletters import RedriveRefusedError
from tests.support.databases import Database
from tests.support.deadletters.world import LEASE, Letters, Redelivered, burial

IDS = [f"m{number}" for number in range(4)]


class LetterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.database = Database("sqlite", "threads", f"sqlite:///{self.folder}/letters.db")
        self.letters = Letters(self.database)
        self.known: dict[str, str] = {}
        """`open`, `redriven` or `resolved`, by message id."""
        self.newest: dict[str, Redelivered] = {}
        self.held: list[Redelivered] = []

    @rule(id_=st.sampled_from(IDS))
    def bury(self, id_: str) -> None:
        """A source may move a letter twice, and a message may die again."""
        if self.known.get(id_) in (None, "open"):
            self.letters.bury(burial(id_))
            self.known[id_] = "open"

    @rule()
    def send_again(self) -> None:
        opened = [id_ for id_, status in self.known.items() if status == "open"]
        try:
            self.letters.send_again(rate=1000)
        except RedriveRefusedError:
            assert not opened
        for id_ in opened:
            self.known[id_] = "redriven"

    @rule(size=st.integers(1, 4))
    def deliver(self, size: int) -> None:
        delivered = self.letters.deliver(size)
        assert len({each.message_id for each in delivered}) == len(delivered) <= size
        for each in delivered:
            assert self.known[each.message_id] == "redriven"
            before = self.newest.get(each.message_id)
            assert before is None or each.token > before.token
            self.newest[each.message_id] = each
            self.held.append(each)
        self.note_deaths()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["done", "failed", "returned"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        ours = self.newest.get(held.message_id) is held and self.known[held.message_id] == "redriven"
        assert self.letters.settle(held, how, error="no" if how == "failed" else "") is ours
        if ours:
            self.newest[held.message_id] = held._replace(id=-1)  # settled: no delivery has it
            self.known[held.message_id] = {"done": "resolved", "failed": "open", "returned": "redriven"}[how]

    @rule(seconds=st.sampled_from([1.0, LEASE + 1, 61.0]))
    def wait(self, seconds: float) -> None:
        self.letters.advance(seconds)

    @rule()
    def restart(self) -> None:
        self.letters.again()

    def note_deaths(self) -> None:
        """A letter that lost too many leases is open again."""
        for letter in self.letters.find():
            if letter.status == "open" and self.known[letter.message_id] == "redriven":
                assert self.newest[letter.message_id].token >= 3
                self.known[letter.message_id] = "open"

    @invariant()
    def each_message_has_one_letter(self) -> None:
        found = {letter.message_id: str(letter.status) for letter in self.letters.find()}
        assert self.letters.count() == len(found)
        assert found == self.known

    def teardown(self) -> None:
        self.database.close()
        shutil.rmtree(self.folder)


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
def test_dead_letters() -> None:
    machine: Any = LetterMachine
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=25))
