"""The model of Redis against a real server: the same commands, in any order, give the same replies and state."""

from __future__ import annotations

import time
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
from redis import Redis

from onceward import ExceptionCategory, Transaction, TransactionException
from onceward._redis.wire import BlockingRedisWire
from onceward._sync import run_blocking
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.redis_streams.protocol import Exchange, StreamQueue
from onceward.connectors.redis_streams.scripts import AGES, DELAYED
from onceward.transaction import Settlement, Verdict
from tests.simulation.brokers.redis import ModelRedis, Stream, show
from tests.support.every_redis import every_redis

LEASE = 50.0
"""Seconds; far more than a run takes. What is to expire gets its idle time by a command."""
RULES = LeaseRules(lease=LEASE, max_deliveries=3, redelivery_delay=10.0)
CONSUMERS = ("anna", "ben")


class Both:
    """Sends commands to both, and compares."""

    def __init__(self, url: str) -> None:
        self.stream = f"both-{uuid4().hex}"
        self._real = BlockingRedisWire(Redis.from_url(url))
        run_blocking(self._real.exchange([("SCRIPT", "FLUSH")]))  # the model knows none yet
        self._model = ModelRedis(time.time)
        self.queues = [
            StreamQueue("both", self.stream, "group", RULES, None, time.monotonic) for _ in CONSUMERS
        ]
        for queue, name in zip(self.queues, CONSUMERS, strict=True):
            queue.consumer = f"{name}-{0:012}"
        first = self.queues[0]
        self._streams, self._hashes = (self.stream, first.dead), (first.history, first.tally)

    def perform(self, exchange: Exchange) -> Any:
        replies: Any = None
        try:
            while True:
                replies = self.send(exchange.send(replies))
        except StopIteration as end:
            return end.value

    def send(self, commands: Any) -> list[Any]:
        replies = run_blocking(self._real.exchange(commands))
        modeled = [self._model.execute(each) for each in commands]
        self._adopt_ids()
        for command, ours, theirs in zip(commands, modeled, replies, strict=True):
            if command[0] not in (
                "XINFO",
                "XRANGE",
            ):  # the first differs between versions; entries are compared below
                assert _rough(ours) == _rough(theirs), command
        return replies

    def _adopt_ids(self) -> None:
        """Give new entries of the model the ids that the server has drawn, by its clock."""
        for key in self._streams:
            modeled: Stream | None = self._model.keys.get(key)
            if modeled is not None and modeled.entries:
                [real] = run_blocking(self._real.exchange([("XRANGE", key, "-", "+")]))
                ids = [_id(entry) for entry, _ in real]
                modeled.entries = dict(zip(ids, modeled.entries.values(), strict=True))
                modeled.last = max(ids)

    def compare(self) -> None:
        group = self.queues[0].group
        for key in self._streams:
            modeled: Stream | None = self._model.keys.get(key)
            real = self._ask("XRANGE", key, "-", "+")
            assert [(entry.decode(), _known(fields)) for entry, fields in real] == [
                (show(id_), _known([each.encode("latin-1") for each in fields]))
                for id_, fields in (modeled.entries if modeled else {}).items()
            ]
        for key in self._hashes:
            pairs = self._ask("HGETALL", key)
            real = {name.decode(): value for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
            ours = {name: each.encode("latin-1") for name, each in self._model.keys.get(key, {}).items()}
            counting = ("counts", "last", "others")  # Redis 6.2 does not count what is added
            assert {name: real[name] for name in real if name not in counting} == {
                name: ours[name] for name in ours if name not in counting
            }
        if self.stream in self._model.keys:
            command = ("XPENDING", self.stream, group, "-", "+", 1000)
            ours = self._model.execute(command)
            assert _rough(self._ask(*command)) == ([] if isinstance(ours, Exception) else _rough(ours))

    def _ask(self, *command: Any) -> Any:
        [reply] = run_blocking(self._real.exchange([command]))
        return [] if isinstance(reply, Exception) else reply

    def close(self) -> None:
        run_blocking(self._real.exchange([("DEL", *self._streams, *self._hashes)]))
        run_blocking(self._real.close())


def _id(entry: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)


def _known(fields: list[bytes]) -> dict[bytes, bytes]:
    """Without the time of death, which each of the two reads from its own clock."""
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    return {name: each for name, each in named.items() if name != b"died_at"}


def _rough(reply: Any) -> Any:
    """Times are not the same to the millisecond, nor are texts of errors to the letter."""
    if isinstance(reply, Exception):
        return type(reply).__name__
    if isinstance(reply, list):
        if len(reply) == 4 and [type(each) for each in reply] == [bytes, bytes, int, int]:
            return [*reply[:2], round(reply[2], -4), reply[3]]  # a row of XPENDING
        return [_rough(each) for each in reply]
    return round(reply, -4) if isinstance(reply, int) and reply >= 1000 else reply


class RedisMachine(RuleBasedStateMachine):
    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.both = Both(self.url)
        self.held: list[tuple[int, Transaction]] = []
        self.sent = 0

    @rule(number=st.integers(1, 3))
    def append(self, number: int) -> None:
        queue = self.both.queues[0]
        named = [Transaction(id=f"m{self.sent + each}", payload="é") for each in range(number)]
        self.sent += number
        self.both.perform(queue.append(queue.entries(named)))

    @rule(who=st.integers(0, 1), size=st.integers(1, 3))
    def fetch(self, who: int, size: int) -> None:
        self.held += [(who, each) for each in self.both.perform(self.both.queues[who].fetch(size))]

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        verdict=st.sampled_from(Verdict),
        business=st.booleans(),
        delay=st.sampled_from([0.0, 20.0, 100.0]),
    )
    def settle(self, data: st.DataObject, verdict: Verdict, business: bool, delay: float) -> None:
        who, transaction = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        category = ExceptionCategory.BUSINESS if business else ExceptionCategory.SYSTEM
        error = TransactionException("no\né", category) if verdict is Verdict.FAILED else None
        settlement = Settlement(transaction, verdict, error, delay if verdict is Verdict.RETURNED else 0.0)
        self.both.perform(self.both.queues[who].settle([settlement]))

    @precondition(lambda self: self.held)
    @rule()
    def extend(self) -> None:
        for who, queue in enumerate(self.both.queues):
            self.both.perform(queue.extend([each for holder, each in self.held if holder == who]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_expire(self, data: st.DataObject) -> None:
        who, transaction = data.draw(st.sampled_from(self.held))
        queue = self.both.queues[who]
        entry, deliveries = queue._deliveries.of(transaction).held
        place = queue.stream, queue.group, queue.consumer
        self.both.send([("XCLAIM", *place, 0, entry, "IDLE", 60_000, "RETRYCOUNT", deliveries, "JUSTID")])

    @rule()
    def end_delays(self) -> None:
        queue = self.both.queues[0]
        held = self.both._ask("XPENDING", queue.stream, queue.group, "-", "+", 1000, DELAYED)
        for entry, _, _, deliveries in held:
            place = queue.stream, queue.group, DELAYED
            self.both.send([("XCLAIM", *place, 0, entry, "IDLE", AGES, "RETRYCOUNT", deliveries, "JUSTID")])

    @rule(who=st.integers(0, 1))
    def release(self, who: int) -> None:
        self.both.perform(self.both.queues[1 - who].release_owner(CONSUMERS[who]))

    @rule()
    def look(self) -> None:
        queue = self.both.queues[0]
        self.both.perform(queue.next_due())
        self.both.perform(queue.counts())

    @rule()
    def forget_dead(self) -> None:
        queue = self.both.queues[0]
        letters = self.both.perform(queue.dead_letters(1))
        self.both.perform(queue.forget_dead([letter.key for letter in letters]))

    @rule()
    def delete(self) -> None:
        """Somebody deletes the group."""
        queue = self.both.queues[0]
        [reply] = run_blocking(self.both._real.exchange([("XGROUP", "DESTROY", queue.stream, queue.group)]))
        if reply == 1:
            self.both._model.keys[queue.stream].groups.clear()

    @invariant()
    def they_are_the_same(self) -> None:
        self.both.compare()

    def teardown(self) -> None:
        self.both.close()


@pytest.mark.hypothesis
@pytest.mark.req("ST-14")
@every_redis
def test_the_model_is_like_the_server(redis_url: str) -> None:
    machine = type("Machine", (RedisMachine,), {"url": redis_url})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=25))  # type: ignore[arg-type]
