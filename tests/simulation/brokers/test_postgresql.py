"""The model of a PostgreSQL queue against the real tables: the same statements in two transactions, the same rows.

Statements that would wait for the other transaction are left out here: one thread cannot wait for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar
from uuid import uuid4

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
from sqlalchemy import make_url, text

from onceward import Transaction
from onceward.connectors.codec import encode_all
from onceward.connectors.lease_rules import BurialReason
from onceward.connectors.leased_deliveries import Held
from onceward.connectors.postgresql.store import PostgreSqlLeaseStore
from tests.simulation.brokers.postgresql import Locked, ModelQueue, QueueTransaction

LONG, OVER = 1000.0, 0.0
"""Seconds of a lease or a delay: far longer than a run, or over at once."""


class Side:
    """One client: its transaction in the model and in the server."""

    def __init__(self, url: str, queue: str, model: ModelQueue) -> None:
        self.model = model
        self.store = PostgreSqlLeaseStore(make_url(url), queue)
        self.current: QueueTransaction | None = None
        self._block = ExitStack()

    def begin(self) -> QueueTransaction:
        if self.current is None:
            self._block.enter_context(self.store.transaction(5.0))
            self.store._move_at = self.store._look_back_at = 0.0
            self.current = self.model.begin()
        return self.current

    def end(self, *, commits: bool) -> None:
        if self.current is None:
            return
        current, self.current = self.current, None
        if commits:
            self._block.close()
            self.model.commit(current)
            return
        try:
            with self._block:
                raise RollBack
        except RollBack:
            self.model.roll_back(current)


class RollBack(Exception):
    pass


class QueueTableMachine(RuleBasedStateMachine):
    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.queue = f"both-{uuid4().hex}"
        self.clock = itertools.count(1.0, 0.001)
        self.model = ModelQueue(lambda: next(self.clock))
        self.sides = [Side(self.url, self.queue, self.model) for _ in range(2)]
        self.seqs: dict[int, int] = {}
        """The number of each row in the server, by that in the model."""
        self.held: list[Held] = []
        """Deliveries, by the numbers of the model."""
        self.tokens = itertools.count(1)

    def real(self, held: Held) -> Held:
        return self.seqs[held[0]], held[1]

    @rule(number=st.integers(1, 3))
    def append(self, number: int) -> None:
        """In a transaction of its own, so both number it alike."""
        side = self.sides[0]
        side.end(commits=True)
        bodies = encode_all([Transaction(id=uuid4().hex) for _ in range(number)])
        seqs = self.model.append(side.begin(), bodies)
        side.store.append(bodies, 0.0)
        side.end(commits=True)
        with side.store.engine.connect() as connection:
            rows = connection.execute(
                text(
                    f"SELECT seq, body FROM {side.store.tables.schema}.onceward_queue_messages WHERE queue = :queue"
                ),  # type: ignore[union-attr]
                {"queue": self.queue},
            )
            found = {bytes(body): seq for seq, body in rows}
        self.seqs |= {seq: found[body] for seq, body in zip(seqs, bodies, strict=True)}

    @rule(who=st.integers(0, 1), size=st.integers(1, 3), lease=st.sampled_from([LONG, OVER]))
    def claim(self, who: int, size: int, lease: float) -> None:
        side, token = self.sides[who], next(self.tokens)
        current = side.begin()
        self.model.move_due(current, size)
        ours = self.model.ready(current, -1, size)
        real = side.store.available(0.0, size)
        assert [(self.seqs[seq], *more) for seq, *more in ours] == [
            (seq, *more, bytes(body)) for seq, *more, body in real
        ]
        self.model.lease(current, ours, token, lease)
        side.store.lease(real, token, lease)
        self.held += [(row[0], token) for row in ours]

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        who=st.integers(0, 1),
        how=st.sampled_from(["extend", "remove", "give back", "return later", "delay", "bury"]),
        later=st.sampled_from([LONG, OVER + 1e-9]),
    )
    def end_delivery(self, data: st.DataObject, who: int, how: str, later: float) -> None:
        held = data.draw(st.sampled_from(self.held))
        side, (seq, token) = self.sides[who], self.real(held)
        current = side.begin()
        row = Transaction(id="x")
        model, store = self.model, side.store
        ours: Callable[[], bool] = {
            "extend": lambda: model.extend(current, held, later),
            "remove": lambda: model.remove(current, held),
            "give back": lambda: model.give_back(current, held),
            "return later": lambda: model.delay(current, held, later, 1),
            "delay": lambda: model.delay(current, held, later, 0),
            "bury": lambda: model.bury(current, *held),
        }[how]
        real: Callable[[], Any] = {
            "extend": lambda: not store.extend([(seq, token)], later),
            "remove": lambda: not store.remove([(seq, token)], [row]),
            "give back": lambda: store.give_back(seq, token, 0.0),
            "return later": lambda: store.give_back(seq, token, later),
            "delay": lambda: store.delay(seq, token, later, None, None, ""),
            "bury": lambda: store.bury(seq, token, 0.0, BurialReason.FAILED, "x"),
        }[how]
        try:
            changed = ours()
        except Locked:
            return
        assert changed == real()

    @rule(who=st.integers(0, 1), commits=st.booleans())
    def end(self, who: int, commits: bool) -> None:
        self.sides[who].end(commits=commits)

    @invariant()
    def they_have_the_same_rows(self) -> None:
        if any(side.current for side in self.sides) or self.sides[0].store.tables is None:
            return
        schema = self.sides[0].store.tables.schema
        with self.sides[0].store.engine.connect() as connection:
            rows = connection.execute(text(_ROWS.format(s=schema)), {"queue": self.queue}).all()
            dead = connection.execute(text(_DEAD.format(s=schema)), {"queue": self.queue}).scalar_one()
        assert sorted(map(tuple, rows)) == sorted(
            (self.seqs[seq], each.deliveries, each.lost, each.visible_at is not None)
            for seq, each in self.model.rows.items()
        )
        assert dead == len(self.model.dead)

    def teardown(self) -> None:
        for side in self.sides:
            side.end(commits=False)
            side.store.close()


_ROWS = """
    SELECT seq, deliveries, lost, false FROM {s}.onceward_queue_messages WHERE queue = :queue
    UNION ALL SELECT seq, deliveries, lost, true FROM {s}.onceward_queue_delayed WHERE queue = :queue
"""
_DEAD = "SELECT count(*) FROM {s}.onceward_queue_dead_letters WHERE queue = :queue"


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
@pytest.mark.req("ST-17")
def test_the_model_is_like_the_tables(postgres_url: str) -> None:
    machine = type("Machine", (QueueTableMachine,), {"url": postgres_url})
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=20))  # type: ignore[arg-type]
