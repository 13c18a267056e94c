"""Queues in servers as state machines: workers fetch, settle, fail and die in any order, and every message ends once.

Their leases are measured by the server, so they never expire here; a worker that dies is named to the others instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
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

from onceward import ExceptionCategory, Transaction, TransactionException
from onceward.connectors.jetstream import JetStreamConnector
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.testing.servers import nats_server
from onceward.transaction import Settlement, Verdict
from tests.support.wait import until

MOST = 4
"""`max_deliveries`."""
RULES: dict[str, Any] = {"lease": 300.0, "max_deliveries": MOST, "redelivery_delay": 0.001}
WORKERS = 2

Delivered = tuple[int, Transaction]


class ServerQueueMachine(RuleBasedStateMachine):
    open_queue: ClassVar[Callable[[str], Any]]

    def __init__(self) -> None:
        super().__init__()
        self.name = f"q-{uuid4().hex}"
        self.workers = [self.hired() for _ in range(WORKERS)]
        self.waiting: set[str] = set()
        self.deliveries: Counter[str] = Counter()
        self.held: list[Delivered] = []
        self.done: set[str] = set()
        self.dead: set[str] = set()
        self.sent = 0

    def hired(self) -> Any:
        worker = type(self).open_queue(self.name)
        worker.owner = uuid4().hex
        return worker

    @rule(number=st.integers(1, 3))
    def dispatch(self, number: int) -> None:
        ids = [f"m{self.sent + each}" for each in range(number)]
        self.sent += number
        self.workers[0].dispatch_transactions([Transaction(id=id_) for id_ in ids])
        self.waiting |= set(ids)

    @precondition(lambda self: self.waiting)
    @rule(who=st.integers(0, WORKERS - 1), size=st.integers(1, 3))
    def fetch(self, who: int, size: int) -> None:
        batch: list[Transaction] = []

        def has_some() -> bool:
            batch.extend(self.workers[who].fetch_transactions(size))
            return bool(batch) or not self.waiting - self.find_dead()

        until(has_some)
        self.find_dead()
        assert len(batch) <= size
        for each in batch:
            assert each.id in self.waiting, f"{each.id} is not there to be taken"
            self.waiting.remove(each.id)
            self.deliveries[each.id] += 1
            assert self.deliveries[each.id] <= MOST
            self.held.append((who, each))

    def find_dead(self) -> set[str]:
        """What was lost too often is buried by the next fetch."""
        found = {letter.transaction_id for letter in self.workers[0].dead_letters()} - self.dead
        for id_ in found:
            assert self.deliveries[id_] >= MOST
            self.waiting.discard(id_)
            self.dead.add(id_)
        return self.dead

    @precondition(lambda self: self.held)
    @rule(data=st.data(), verdict=st.sampled_from(Verdict), business=st.booleans())
    def settle(self, data: st.DataObject, verdict: Verdict, business: bool) -> None:
        who, transaction = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        id_, error = transaction.id, None
        if verdict is Verdict.FAILED:
            category = ExceptionCategory.BUSINESS if business else ExceptionCategory.SYSTEM
            error = TransactionException("no", category)
        settlement = Settlement(transaction, verdict, error)
        self.workers[who].settle_transactions([settlement])
        self.workers[who].settle_transactions([settlement])  # twice is once
        if verdict is Verdict.DONE:
            self.done.add(id_)
        elif verdict is Verdict.FAILED and (business or self.deliveries[id_] >= MOST):
            self.dead.add(id_)
        else:
            self.deliveries[id_] -= verdict is Verdict.RETURNED
            self.waiting.add(id_)

    @precondition(lambda self: self.held)
    @rule(who=st.integers(0, WORKERS - 1))
    def extend(self, who: int) -> None:
        self.workers[who].extend_transactions([each for holder, each in self.held if holder == who])

    @rule(who=st.integers(0, WORKERS - 1))
    def die(self, who: int) -> None:
        gone, self.workers[who] = self.workers[who], self.hired()
        held = [each.id for holder, each in self.held if holder == who]
        assert self.workers[who].release_owner(gone.owner) == len(held)
        gone.close()
        self.waiting |= set(held)
        self.held = [(holder, each) for holder, each in self.held if holder != who]

    @invariant()
    def nothing_is_lost(self) -> None:
        held = {each.id for _, each in self.held}
        assert self.sent == len(self.waiting) + len(held) + len(self.done) + len(self.dead)

    def teardown(self) -> None:
        try:
            for who in range(WORKERS):
                self.die(who)
            while self.waiting:
                self.fetch(0, 3)
                for who, each in self.held:
                    self.workers[who].settle_transactions([Settlement(each, Verdict.DONE)])
                    self.done.add(each.id)
                self.held.clear()
            counts = self.workers[0].counts()
            assert {name: count for name, count in counts.items() if count and name != "dead"} == {}
            assert counts["dead"] == len(self.dead)
        finally:
            for worker in self.workers:
                worker.close()


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with nats_server() as server:
        yield server.url


@pytest.fixture(params=["redis", "postgresql", "jetstream"])
def open_queue(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    if request.param == "redis":
        redis_url = request.getfixturevalue("redis_url")
        return lambda name: RedisStreamsConnector(redis_url, name, **RULES)
    if request.param == "postgresql":
        postgres_url = request.getfixturevalue("postgres_url")
        return lambda name: PostgreSqlConnector(postgres_url, name, **RULES)
    nats_url = request.getfixturevalue("nats_url")
    return lambda name: JetStreamConnector(nats_url, name, **RULES)


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
def test_queue_in_a_server(open_queue: Callable[[str], Any]) -> None:
    machine = type("Machine", (ServerQueueMachine,), {"open_queue": staticmethod(open_queue)})
    run_state_machine_as_test(machine, settings=settings(max_examples=6, stateful_step_count=15))  # type: ignore[arg-type]
