"""The claims of the outbox as a state machine: made, extended, ended and lost in any order, compared with a model."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

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

from onceward.outbox.claims import Ending, OutboxClaim, OutboxRows, Row, SendFailure
from tests.support.outbox import OutboxWorld
from tests.support.schema import Schema, new_schema

LONG, OVER = 1000.0, 0.0
"""Seconds of a lease or a delay: far longer than a run, or over at once."""


class SentMessage:
    """What the model knows of a message."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.token: int | None = None
        """Of the claim that has it, unless that is over."""
        self.state = "waiting"


class ClaimMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.world = OutboxWorld(self.url())
        self.rows = OutboxRows(self.world.engine)
        self.messages: dict[str, SentMessage] = {}
        """Those that are committed, in the order of their numbers."""
        self.claims: list[OutboxClaim] = []
        self.numbers = itertools.count()

    def url(self) -> str:
        return f"sqlite:///{self.folder}/shop.db"

    @rule(number=st.integers(1, 3), key=st.sampled_from([None, "a", "b"]))
    def send(self, number: int, key: str | None) -> None:
        ids = [f"m{next(self.numbers)}" for _ in range(number)]
        for id_ in ids:
            self.world.send(id_, id=id_, key=key)
            self.messages[id_] = SentMessage(key)

    @rule(lease=st.sampled_from([LONG, OVER]))
    def claim_some(self, lease: float) -> None:
        self.claim(lease)

    def claim(self, lease: float) -> None:
        for claim in self.rows.claim(2, without=(), promote=True, lease=lease, owner=None):
            assert [row.seq for row in claim.rows] == sorted(row.seq for row in claim.rows)
            for row in claim.rows:
                message = self.messages[row.message_id]
                assert message.state == "waiting"
                assert message.token is None, "it was claimed from another who still has it"
            self.check_order(claim)
            for row in claim.rows:
                self.messages[row.message_id].token = claim.token if lease else None
            self.claims.append(claim)

    @rule()
    def overtake(self) -> None:
        """A relay loses its claims, and another gets them."""
        self.claim(OVER)
        self.claim(LONG)

    def check_order(self, claim: OutboxClaim) -> None:
        """Of a key, a claim takes the first ones."""
        taken = {row.message_id for row in claim.rows}
        for key in {row.key for row in claim.rows} - {None}:
            waiting = [
                id_ for id_, each in self.messages.items() if each.key == key and each.state == "waiting"
            ]
            ours = [id_ for id_ in waiting if id_ in taken]
            assert waiting[: len(ours)] == ours

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), how=st.sampled_from(["published", "returned", "dead", "fails", "waits"]))
    def end(self, data: st.DataObject, how: str) -> None:
        claim = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        rows = list(claim.rows)
        if how in ("published", "returned"):
            ending = Ending(published=rows) if how == "published" else Ending(returned=rows)
        else:
            delay = {"dead": None, "fails": OVER, "waits": LONG}[how]
            ending = Ending(failed=[SendFailure(row, "no", "{}\n", delay) for row in rows])
        overtaken = [row for row in rows if self.is_overtaken(claim, row)]
        fenced = self.rows.end(claim, ending)
        ours = [row for row in rows if self.holds(claim, row)]
        assert len(overtaken) <= fenced <= len(rows) - len(ours)
        for row in ours:
            message = self.messages[row.message_id]
            message.token = -1 if how == "waits" else None
            message.state = how if how in ("published", "dead") else "waiting"
        self.adopt([row for row in rows if row not in ours], how)

    def holds(self, claim: OutboxClaim, row: Row) -> bool:
        message = self.messages[row.message_id]
        return message.state == "waiting" and message.token == claim.token

    def is_overtaken(self, claim: OutboxClaim, row: Row) -> bool:
        message = self.messages[row.message_id]
        return message.state != "waiting" or message.token not in (None, claim.token)

    def adopt(self, others: list[Row], how: str) -> None:
        """A claim whose lease is over may still end its messages, unless another has claimed them since."""
        states, tokens = self.column("state"), self.column("token")
        for row in others:
            message, state = self.messages[row.message_id], states[row.message_id]
            if message.state == "waiting" and message.token is None:
                if how in ("published", "dead") and state == how:
                    message.state = state
                elif how == "waits" and (state, tokens[row.message_id]) == ("held", None):
                    message.token = -1

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        lost = self.rows.extend([claim], LONG)
        if all(self.holds(claim, row) for row in claim.rows):
            assert not lost
        tokens = self.column("token")
        for row in claim.rows:
            if tokens[row.message_id] == claim.token:
                self.messages[row.message_id].token = claim.token

    def column(self, name: str) -> dict[str, Any]:
        """A column of the table, by the id of the message."""
        return dict(zip(self.world.rows("message_id"), self.world.rows(name), strict=True))

    @invariant()
    def ends_are_kept(self) -> None:
        states = self.column("state")
        assert list(states) == list(self.messages)
        for id_, message in self.messages.items():
            if message.state == "waiting":
                assert states[id_] not in ("published", "dead")
            else:
                assert states[id_] == message.state

    def teardown(self) -> None:
        try:
            self.publish_the_rest()
        finally:
            self.world.close()
            shutil.rmtree(self.folder)

    def publish_the_rest(self) -> None:
        """Nothing is stuck: once claims are given back and delays are over, everything can be published."""
        with self.world.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE onceward_outbox SET at = 0 WHERE state = 'held'")
        for _ in range(100):
            claims = self.rows.claim(2, without=(), promote=True, lease=LONG, owner=None)
            for claim in claims:
                assert self.rows.end(claim, Ending(published=list(claim.rows))) == 0
            if not claims:
                break
        assert set(self.column("state").values()) <= {"published", "dead"}


class PostgreSqlClaimMachine(ClaimMachine):
    """The same on PostgreSQL, where a transaction may commit after later ones."""

    schema: ClassVar[Schema]

    def __init__(self) -> None:
        super().__init__()
        with self.world.engine.begin() as connection:
            connection.exec_driver_sql("TRUNCATE onceward_outbox")
        self.late: ExitStack | None = None

    def url(self) -> str:
        return self.schema.plain_url

    @precondition(lambda self: self.late is None)
    @rule()
    def begin_late(self) -> None:
        self.late = ExitStack()
        connection = self.late.enter_context(self.world.engine.begin())
        self.late_id = f"m{next(self.numbers)}"
        self.place = len(self.messages)
        self.world.app.outbox(connection).send("redis://x/ship", self.late_id, id=self.late_id)

    @precondition(lambda self: self.late is not None)
    @rule()
    def commit_late(self) -> None:
        assert self.late is not None
        self.late.close()
        self.late = None
        known = list(self.messages.items())
        known.insert(self.place, (self.late_id, SentMessage(None)))
        self.messages = dict(known)

    def teardown(self) -> None:
        if self.late is not None:
            self.late.close()
        super().teardown()


@pytest.fixture
def schema(postgres_url: str) -> Iterator[Schema]:
    with new_schema(postgres_url) as made:
        yield made


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
def test_claims_in_a_file() -> None:
    run_state_machine_as_test(ClaimMachine, settings=settings(max_examples=12, stateful_step_count=20))


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
def test_claims_in_postgresql(schema: Schema) -> None:
    machine = type("Machine", (PostgreSqlClaimMachine,), {"schema": schema})
    run_state_machine_as_test(machine, settings=settings(max_examples=6, stateful_step_count=20))  # type: ignore[arg-type]
