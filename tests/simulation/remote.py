"""The world of consumers on other sources than a file, and in threads."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from pathlib import Path
from typing import Any

from onceward import ConsumerTask, Transaction
from onceward._sync import run_blocking
from onceward.inbox import Inbox
from tests.simulation.consumers import RULES, ConsumerWorld
from tests.simulation.loop import Process
from tests.simulation.simulation import SimulatedClock
from tests.simulation.sources.jetstream import JetStreamSource
from tests.simulation.sources.nats import SimulatedNats
from tests.simulation.sources.postgresql import RowSource
from tests.simulation.sources.redis import RedisSource
from tests.simulation.sources.source import Source
from tests.simulation.threads import SimulatedThread, block


class RedisWorld(ConsumerWorld):
    services = ("redis", "database")

    def make_source(self, folder: Path) -> Source:
        return RedisSource(self.wire, self, RULES, self.root)


class PostgreSqlWorld(ConsumerWorld):
    services = ("postgresql", "database")

    def make_source(self, folder: Path) -> Source:
        return RowSource(self.wire, self, RULES, self.root)


class JetStreamWorld(ConsumerWorld):
    services = ("nats", "database")

    def make_source(self, folder: Path) -> Source:
        return JetStreamSource(self.wire, self, RULES, self.root)

    def stand_ins(self, clock: Any) -> dict[str, Any]:
        return {
            "onceward._nats.connection.Client": lambda: SimulatedNats(self.source),
            "onceward._nats.connection.time": clock,
            "onceward._nats.wire.nats_loop": lambda: self.loop,
            "onceward.connectors.jetstream.ledger.time": clock,
            "onceward.connectors.jetstream.queue.time": clock,
            "onceward.connectors.jetstream.queue.Context": copy_context,
        }


class ThreadWorld(ConsumerWorld):
    """The engine, inbox and connectors for threads, on a file or on Redis."""

    services = ("queue", "redis", "database")
    in_threads = True

    def make_source(self, folder: Path) -> Source:
        if self.random.random() < 0.5:
            return self.file_source(folder)
        return RedisSource(self.wire, self, RULES, self.root)

    async def _work(self, process: Process) -> None:
        thread = SimulatedThread(target=self._work_in_thread, args=(process,))
        thread.start()
        await thread.ended()

    def _work_in_thread(self, process: Process) -> None:
        services = {}
        if self.contract is not None:
            services["inbox"] = Inbox(self.database.blocking_engine(), clock=process.clock)
        source = self.source.open_blocking(process)
        task = BlockingBilling(self, process, connectors={"source": source}, services=services)
        while True:
            try:
                task.consume_transactions(self.policy)
            except Exception as error:
                self.history.note(process, "its loop ends: %s: %.200s", type(error).__name__, error)
            sleep(1.0)

    def charging(self, process: Process, key: str, what: str) -> Any:
        return block(self.charge(process, key, what))


class BlockingBilling(ConsumerTask):
    def __init__(self, world: ThreadWorld, process: Process, **parts: Any) -> None:
        super().__init__(**parts)
        self.clock = SimulatedClock(world.loop)
        self.contract = world.contract
        self._world = world
        self._process = process

    def process_transaction(self, transaction: Transaction, /, *session: Any, **_: Any) -> None:
        run_blocking(self._world.handle(self._process, transaction, session, sleep))


def sleep(seconds: float) -> None:
    block(asyncio.sleep(seconds))
