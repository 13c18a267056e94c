"""Leasing queues as state machines: any order of calls, crashes and expired leases, compared with a model."""

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
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from onceward import ExceptionCategory, Transaction, TransactionException
from onceward.connectors import MemoryConnector, SqliteConnector
from onceward.testing.clock import FakeClock
from onceward.transaction import Settlement, Verdict

LEASE = 10.0
MOST = 4
"""`max_deliveries`."""


class Message:
    """What the model knows of a message."""

    def __init__(self) -> None:
        self.deliveries = 0
        self.visible_at = 0.0
        self.holder: Transaction | None = None
        """Its newest delivery, until that is settled."""


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(1_000.0)
        self.messages: dict[str, Message] = {}
        self.done: set[str] = set()
        self.dead: set[str] = set()
        self.held: list[Transaction] = []
        """Everything that was fetched and not settled, also what is overdue."""
        self.sent = 0

    @initialize()
    def begin(self) -> None:
        self.queue: Any = self.opened()

    def opened(self) -> Any:
        return MemoryConnector(clock=self.clock, lease=LEASE, max_deliveries=MOST, redelivery_delay=1.0)

    @rule(number=st.integers(1, 3))
    def dispatch(self, number: int) -> None:
        ids = [f"m{self.sent + each}" for each in range(number)]
        self.sent += number
        self.queue.dispatch_transactions([Transaction(id=id_) for id_ in ids])
        self.messages |= {id_: Message() for id_ in ids}

    @rule(size=st.integers(1, 3))
    def fetch(self, size: int) -> None:
        now = self.clock()
        available = {id_ for id_, each in self.messages.items() if each.visible_at <= now}
        batch = self.queue.fetch_transactions(size)
        self.bury({letter.transaction_id for letter in self.queue.dead_letters()} - self.dead)
        assert len(batch) <= size
        assert bool(batch) == bool(available - self.dead)
        for transaction in batch:
            assert transaction.id in available
            message = self.messages[transaction.id]
            message.deliveries += 1
            assert message.deliveries <= MOST
            message.visible_at = now + LEASE
            message.holder = transaction
            self.held.append(transaction)

    def bury(self, ids: set[str]) -> None:
        for id_ in ids:
            assert self.messages.pop(id_).deliveries >= MOST
            self.dead.add(id_)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        verdict=st.sampled_from(Verdict),
        business=st.booleans(),
        delay=st.sampled_from([0.0, 3.0]),
    )
    def settle(self, data: st.DataObject, verdict: Verdict, business: bool, delay: float) -> None:
        transaction = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        error = None
        if verdict is Verdict.FAILED:
            category = ExceptionCategory.BUSINESS if business else ExceptionCategory.SYSTEM
            error = TransactionException("no", category)
        settlement = Settlement(transaction, verdict, error, delay if verdict is Verdict.RETURNED else 0.0)
        self.queue.settle_transactions([settlement])
        self.queue.settle_transactions([settlement])  # twice is once
        message = self.messages.get(transaction.id)
        if message is None or message.holder is not transaction:
            return  # a newer delivery owns it, or it is dead
        message.holder = None
        if verdict is Verdict.DONE:
            del self.messages[transaction.id]
            self.done.add(transaction.id)
        elif verdict is Verdict.RETURNED:
            message.deliveries -= 1
            message.visible_at = self.clock() + delay if delay else 0.0
        elif business or message.deliveries >= MOST:
            del self.messages[transaction.id]
            self.dead.add(transaction.id)
        else:
            message.visible_at = self.clock() + 2.0 ** (message.deliveries - 1)

    @precondition(lambda self: self.held)
    @rule()
    def extend(self) -> None:
        self.queue.extend_transactions(self.held)
        for transaction in self.held:
            message = self.messages.get(transaction.id)
            if message is not None and message.holder is transaction:
                message.visible_at = self.clock() + LEASE

    @rule(seconds=st.sampled_from([0.5, 4.0, LEASE + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        counts = self.queue.counts()
        now = self.clock()
        waiting = [each for each in self.messages.values() if each.visible_at > now]
        leased = sum(each.holder is not None for each in waiting)
        assert counts == {
            "ready": len(self.messages) - len(waiting),
            "leased": leased,
            "delayed": len(waiting) - leased,
            "dead": len(self.dead),
        }
        assert self.sent == len(self.messages) + len(self.done) + len(self.dead)

    def teardown(self) -> None:
        self.queue.close()


class FileQueueMachine(QueueMachine):
    """The same in a file, which survives its processes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.killed: list[Any] = []

    def opened(self) -> Any:
        return SqliteConnector(
            self.folder / "queue.db",
            synchronous="OFF",
            clock=self.clock,
            lease=LEASE,
            max_deliveries=MOST,
            redelivery_delay=1.0,
        )

    @rule(closes=st.booleans())
    def restart(self, closes: bool) -> None:
        """Nobody can settle what the last process held."""
        if closes:
            self.queue.close()
        else:
            self.killed.append(self.queue)
        self.held.clear()
        self.queue = self.opened()

    def teardown(self) -> None:
        super().teardown()
        for queue in self.killed:
            queue.close()
        shutil.rmtree(self.folder)


@pytest.mark.hypothesis
@pytest.mark.req("ST-12")
@pytest.mark.parametrize("machine", [QueueMachine, FileQueueMachine])
def test_queue(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=30))
