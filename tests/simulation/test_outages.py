"""A provider is down for ten minutes of simulated time: three processes with default settings wait for it together.

Engine, connector, rules and board are the real ones. The three share a queue in memory, and records as a database
would have them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from math import inf
from random import Random
from typing import Any

import pytest

from onceward import AsyncConsumerTask, Refuse, Transaction
from onceward.connectors.lease_rules import BurialReason, LeaseRules
from onceward.connectors.leases import AsyncLeasingConnector, LeasingConnector
from onceward.connectors.memory import MemoryLeaseStore
from onceward.failures.board import Board
from onceward.failures.middleware import LEASE, FailureRules
from onceward.failures.rules import PROBE_EVERY, RuleBook
from onceward.failures.states import ProcessRecords
from onceward.task.mixins.policies import ConsumerPolicy
from tests.simulation import loop as simulated
from tests.simulation.loop import Process, SimulatedLoop, quiet
from tests.simulation.simulation import SimulatedClock

POLICY = ConsumerPolicy.model_validate(
    {
        "loop": {
            "streaming": True,
            "mode": "continuous",
            "batch": {"size": 100},
            "concurrency": {"value": 64},
        }
    }
)
"""The defaults of an app."""
BEGINS, ENDS = 0.2, 600.2
"""When the provider goes down, and when it is up again."""
POISON = 77
NEVER_REACHED = 78
"""A message for which the provider never answers, as if that were its own fault."""


class Queue(AsyncLeasingConnector):
    extend_from_thread = None  # type: ignore[assignment]  # there are no threads

    def __init__(self, store: MemoryLeaseStore, process: Process) -> None:
        super().__init__(LeasingConnector(store, LeaseRules(), process.clock))
        self._store = store
        self._process = process

    async def _call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.002)
        return function(*args, **kwargs)

    async def await_transactions_async(self, seconds: float) -> bool:
        due = self._store.due()
        ready_in = inf if due is None else max(due - self._process.clock(), 0.0)
        await asyncio.sleep(min(seconds, ready_in))
        return ready_in <= seconds


class Charge(AsyncConsumerTask):
    def __init__(self, world: World, process: Process) -> None:
        super().__init__(connectors={"source": Queue(world.store, process)})
        self.clock = SimulatedClock(world.loop)
        self.middleware = (FailureRules(RuleBook(), Board(), world.records, "shop", ("charge", "charge")),)
        self._world = world
        self._process = process

    async def process_transaction(self, transaction: Transaction, /, **_: Any) -> None:
        await self._world.charge(transaction.payload, self._process)


class World:
    def __init__(self, messages: int, seed: int) -> None:
        self.loop = SimulatedLoop(Random(seed))
        self.store = MemoryLeaseStore()
        self.records = ProcessRecords(self.loop.time)
        self.messages = messages
        self.calls: list[float] = []
        """When the provider was called while it was down."""
        self.effects: Counter[int] = Counter()
        self.done_at: list[float] = []
        self.killed: set[str] = set()
        self.kills_prober = False

    async def charge(self, number: int, process: Process) -> None:
        if number == POISON:
            raise Refuse("no such card")
        now = self.loop.time()
        is_down = BEGINS <= now < ENDS
        if is_down:
            self.calls.append(now)
        await asyncio.sleep(0.1)
        if self.kills_prober and is_down and now > 60 and not self.killed:
            self.killed.add(process.name)
            self.loop.kill(process)
            return
        if is_down or number == NEVER_REACHED:
            raise ConnectionRefusedError("nothing listens there")
        self.effects[number] += 1
        self.done_at.append(self.loop.time())

    def run(self) -> None:
        root = self.loop.process("root")
        queue = Queue(self.store, root)

        async def work(process: Process) -> None:
            await Charge(self, process).consume_transactions(POLICY)

        async def live() -> None:
            # The last fifth arrives while the provider is down.
            early = self.messages * 4 // 5
            await queue.dispatch_transactions_async([Transaction(payload=number) for number in range(early)])
            for name in ("anna", "ben", "carl"):
                process = self.loop.process(name)
                process.start(work(process))
            await asyncio.sleep(ENDS / 2)
            more = [Transaction(payload=number) for number in range(early, self.messages)]
            await queue.dispatch_transactions_async(more)
            await asyncio.sleep(ENDS / 2 + 1.5 * 3600)

        with quiet():
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(root.start(live()))
            finally:
                asyncio.set_event_loop(None)
                self.loop.bury()


@pytest.mark.req("OU-01", "OU-03", "OU-04")
@pytest.mark.parametrize(
    ("messages", "kills_prober"),
    [(1000, True), pytest.param(10_000, False, marks=pytest.mark.long)],
    ids=["a thousand, and the prober dies", "ten thousand"],
)
def test_ten_minutes_without_the_provider_cost_no_message_anything(
    messages: int, kills_prober: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "MOST_STEPS", 10**9)
    world = World(messages, seed=19)
    world.kills_prober = kills_prober
    world.run()

    assert world.effects == Counter(n for n in range(messages) if n not in (POISON, NEVER_REACHED))
    dead = {each.transaction.payload: each for each in world.store.dead(10) if each.transaction is not None}
    assert dead.keys() == {POISON, NEVER_REACHED}
    assert dead[NEVER_REACHED].reason is BurialReason.MAX_DELIVERIES
    lasted = (dead[NEVER_REACHED].died_at - dead[NEVER_REACHED].enqueued_at).total_seconds()
    assert lasted >= 3600

    # What was in flight when it went down, and then one probe for each interval, of all processes together.
    probes = [at for at in world.calls if at > BEGINS + 1.0]
    gaps = [after - before for before, after in pairwise(probes)]
    assert min(gaps) >= PROBE_EVERY
    assert max(gaps) <= (LEASE + 2.0 if kills_prober else 2.0)
    assert len(probes) >= (ENDS - BEGINS) / 2 - 10

    resumed = [at for at in world.done_at if at > ENDS]
    assert len([at for at in resumed if at <= ENDS + 2.0]) >= min(500, messages // 4)
    assert not [at for at in world.done_at if BEGINS + 0.15 < at < ENDS]
