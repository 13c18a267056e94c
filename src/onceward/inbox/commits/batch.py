"""Batch handlers: one call and one commit for several events, each with its own dedup row.

The first life of a batch makes the attempt for all; the others get their results from it. If it fails, nothing of it
has happened, and the engine halves the batch until the event that fails is alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from onceward._sync import Raised
from onceward.inbox.attempts import Company
from onceward.inbox.commits.attempt import EventAttempt
from onceward.inbox.errors import Busy
from onceward.inbox.result import DONE, DUPLICATE, SUPERSEDED, Result
from onceward.inbox.sessions.acknowledgment import take_off_together
from onceward.task.exceptions import Postponed
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.inbox.processor import EventProcessor

BatchHandler = Callable[[Sequence[EventAttempt], Any], Awaitable[Any]]
"""Wraps exceptions of user code in `Raised`."""


class BatchCommits:
    """The batches of one call of one consumer."""

    batches = True
    size = 1
    """Of a batch, at most; the engine sets it to that of the policy."""

    def __init__(
        self,
        processor: EventProcessor,
        expected: dict[int, Any],
        attempt_of: Callable[[Transaction], EventAttempt],
        handler: BatchHandler,
    ) -> None:
        self.at_once = processor.store.groups_at_once
        self.processor = processor
        self.expected = expected
        self.attempt_of = attempt_of
        self.handler = handler

    def unit(self) -> BatchCommit:
        return BatchCommit(self)


class BatchCommit:
    """One batch."""

    closed = False
    seconds = 0.0

    def __init__(self, commits: BatchCommits) -> None:
        self._commits = commits
        self.size = commits.size
        self.transactions: Sequence[Transaction] = ()
        """Those of its lives. The engine sets it."""
        self._results: dict[int, Result] | None = None
        self._left_out: set[int] = set()
        self.postponed: Postponed | None = None
        """Why none of them could be begun now."""

    def repeats(self, transaction: Transaction) -> bool:
        return id(transaction) in self._left_out

    async def run(self) -> None:
        """Make one attempt at all of them, unless that was done."""
        if self._results is not None:
            return
        if self.postponed is not None:
            raise self.postponed
        try:
            await self._run()
        except Raised as carried:
            self.postponed = carried.raised if isinstance(carried.raised, Postponed) else None
            raise
        except Postponed as error:
            self.postponed = error
            raise

    async def _run(self) -> None:
        processor, expected = self._commits.processor, self._commits.expected
        attempts: dict[int, EventAttempt] = {}
        for each in self.transactions:
            if id(each) in expected:
                attempts[id(each)] = attempt = self._commits.attempt_of(each)
                attempt.check()
                assert attempt.start is not None
                attempt.prepare(attempt.start)
                await processor.prepare_day(attempt.key)
            else:
                self._left_out.add(id(each))  # its start has to be recorded first, or it must run alone
        results: dict[int, Result] = {}
        if attempts:
            await processor.enter(Company.ALL)
            try:
                results = await self._commit(attempts)
            finally:
                processor.ports.gate.leave()
        self._results = results
        for number, result in results.items():
            expected.pop(number, None)
            departure = attempts[number].departure
            if departure is not None:
                departure.committed()
            processor.done(attempts[number], result)

    async def _commit(self, attempts: dict[int, EventAttempt]) -> dict[int, Result]:
        processor = self._commits.processor
        session = processor.ports.session()
        session.event = next(iter(attempts.values())).event
        await processor.reachable(session.port.enter)
        error: BaseException | None = None
        try:
            results: dict[int, Result] = {}
            new: list[EventAttempt] = []
            for number, attempt in attempts.items():
                try:
                    handling = await processor.admit(attempt, session, letters=False)
                except Busy:  # another copy of it is in flight
                    self._left_out.add(number)
                    continue
                results[number] = Result(handling)
                new += [attempt] if handling is DONE else []
            if new:
                processor.let_send(session, new[0])
                session.event = new[0].event
                await self._commits.handler(new, session)
                if session.unsettled is not None:
                    session.unsettled.check(new[0].key.tracking_id)
            admitted = [attempts[each] for each, result in results.items() if not result.duplicate]
            if admitted:
                await session.apply(processor.resolve_letters, admitted)
            leaving = []
            for number, result in results.items():
                attempt = attempts[number]
                if attempt.departure is not None:
                    attempt.departure.wait()
                    leaving.append((attempt.departure, attempt.key, result.handling is not DUPLICATE))
            for departure, key, fenced in leaving:
                if not departure.waits:
                    await session.apply(departure.take_off, key, fenced)
            if leaving:
                await session.apply(take_off_together, leaving)
            return results
        except BaseException as raised:
            error = raised
            raise
        finally:
            await processor.leave(session.port, error)

    def result_of(self, transaction: Transaction) -> Result:
        assert self._results is not None
        return self._results.get(id(transaction), Result(SUPERSEDED))

    async def decide(self) -> None:
        """Nothing is left to decide: the attempt has."""

    async def abandon(self) -> None:
        """Nothing is left to undo."""
