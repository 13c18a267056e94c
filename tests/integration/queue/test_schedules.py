"""Random schedules of consumers that start, work, crash, stop and claim: nothing is lost, or delivered as new twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onceward.queue import QueueMessage, UndecodableEntryError
from tests.support.queue.world import QueueWorld

SEEDS = 200
STEPS = 40


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[QueueWorld]:
    with QueueWorld(request.param, redis_url, tmp_path) as made:
        yield made


class Schedule:
    def __init__(self, world: QueueWorld, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.stream = f"{world.stream}-{seed}"
        self.client = world.client()
        self.producer = world.queue(self.client, stream_key=self.stream)
        self.consumers = [self.consumer(), self.consumer()]
        self.sent: list[str] = []
        self.bad: list[str] = []
        self.new: Counter[str] = Counter()
        """How often each was delivered as a new message."""
        self.effects: set[str] = set()
        self.in_hand: dict[Any, list[QueueMessage]] = {}

    def consumer(self) -> Any:
        name = f"c{self.random.randrange(10**6)}"
        skip = self.random.random() < 0.5
        return self.world.consumer(
            self.client, stream_key=self.stream, consumer_name=name, block_ms=1, claim_skip_own_messages=skip
        )

    def run(self) -> None:
        steps = (
            [self.send] * 4 + [self.send_bad] + [self.take] * 5 + [self.work] * 4 + [self.crash, self.stop]
        )
        steps += [self.claim, self.ask]
        for _ in range(STEPS):
            self.random.choice(steps)()
        self.drain()

    def send(self) -> None:
        self.sent.append(self.producer.enqueue(len(self.sent)))

    def send_bad(self) -> None:
        self.bad.append(self.world.admin.xadd(self.stream, {"data": "{"}).decode())

    @property
    def has_new(self) -> bool:
        """Avoids empty reads: Redis makes them wait for a tenth of a second, however short the block."""
        return len(self.new) < len(self.sent) + len(self.bad)

    def take(self) -> None:
        consumer = self.random.choice(self.consumers)
        if not self.has_new:
            return
        try:
            message = consumer.next()
        except UndecodableEntryError as error:
            self.new.update(entry.id for entry in error.entries)
            return
        if message is not None:
            self.new[message.id] += 1
            self.in_hand.setdefault(consumer, []).append(message)

    def work(self) -> None:
        """The effect, and then the ack, unless the process dies in between."""
        consumer = self.random.choice(self.consumers)
        for message in self.in_hand.pop(consumer, []):
            self.effects.add(message.id)
            if self.random.random() < 0.8:
                consumer.ack(message)

    def crash(self) -> None:
        self.replace(self.random.choice(self.consumers))

    def stop(self) -> None:
        consumer = self.random.choice(self.consumers)
        consumer.stop()
        assert consumer.next() is None
        self.replace(consumer)

    def replace(self, consumer: Any) -> None:
        self.in_hand.pop(consumer, None)
        consumer.close()
        self.consumers[self.consumers.index(consumer)] = self.consumer()

    def claim(self) -> None:
        consumer = self.random.choice(self.consumers)
        try:
            messages = consumer.claim_stale(min_idle_ms=0, count=self.random.randint(1, 5))
        except UndecodableEntryError:
            return
        self.in_hand.setdefault(consumer, []).extend(messages)

    def ask(self) -> None:
        stats = self.producer.backlog_stats()
        assert stats.pending <= stats.length == len(self.sent) + len(self.bad)

    def drain(self) -> None:
        last = self.world.consumer(
            self.client, stream_key=self.stream, consumer_name="last", block_ms=1, claim_idle_ms=0
        )
        unread: set[str] = set()
        while True:
            try:
                messages = [last.next()] if self.has_new else last.claim_stale()
            except UndecodableEntryError as error:
                ids = [entry.id for entry in error.entries]
                self.new.update(id_ for id_ in ids if self.new[id_] == 0)
                unread.update(ids)
                for entry in error.entries:
                    last.ack(entry)
                continue
            if not messages:
                break
            for message in messages:
                self.new[message.id] += self.has_new
                self.effects.add(message.id)
                last.ack(message)
        assert self.effects == set(self.sent), "every message took effect"
        assert unread == set(self.bad), "every bad entry was reported"
        assert max(self.new.values(), default=1) == 1, "none was delivered as new twice"
        assert self.producer.backlog_stats().pending == 0
        for thing in [*self.consumers, last, self.producer]:
            thing.close()
        self.world.admin.delete(self.stream)


@pytest.mark.req("QC-02", "QC-15", "QC-18")
def test_two_hundred_random_schedules_lose_nothing(world: QueueWorld) -> None:
    for seed in range(SEEDS):
        try:
            Schedule(world, seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
