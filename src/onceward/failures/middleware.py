"""Failure rules as middleware: judge what a handler raised, and hold its consumer while what it needs is down.

                     ┌─ `after` different messages in a row ─┐
    consuming ───────┘                                       └──► down: fetches nothing, gives back what it has
        ▲                                                          │  ▲
        └────────────── the probe succeeds ◄── one message ◄───────┘  └── the probe fails: the interval grows

One process of the fleet at a time has the lease for the probe, and it takes that for a message that it has fetched: one
that is idle, or waits for its limit, keeps nobody from probing. A failed probe comes back later than the next one is
due, so that one takes another message: a message that is poison cannot keep everything down.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import msgspec

from onceward.backoff import Backoff
from onceward.connectors.lease_rules import RedeliveryPlan
from onceward.errors import OncewardError
from onceward.failures.board import DEPENDENCY, Board, NewOutage, hold_of, shown, subjects_of
from onceward.failures.rules import BusinessRule, OutageRule, RuleBook, members_of
from onceward.failures.signs import retry_after_of
from onceward.failures.states import HoldRecords, Identity
from onceward.middleware import Middleware, SourceCalls, StepInfo, sleep
from onceward.task.attempts.observers import ObservingMiddleware, StepObserver
from onceward.task.exceptions import ExceptionCategory, Postponed, TransactionException, postponement_of
from onceward.task.lifecycle import text_of
from onceward.task.work import DUPLICATE
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

_log = OwnLogger(logging.getLogger("onceward.failures"))

LOOK = 1.0
"""Seconds between two looks at the records."""
LOOK_WHILE_DOWN = 0.25
NAP = 0.1
"""Seconds that a held consumer sleeps at a time: it may be asked to stop."""
LEASE = 10.0
"""Seconds after which another process probes, if the one that has the probe is silent."""
RETURN = Backoff(1.0, jitter=0.5)
"""The delay of a message that is given back: fetching has stopped, and it must be there when it goes on."""
LATER, LATEST = 1.5, 30.0
"""A failed probe comes back after this many intervals, at least, so later than the next probe is due; and after half as
many intervals as there were probes, but for that at most this many seconds. Some sources deliver the oldest first, and
a few that are poison must not take turns."""


class DependencyDown(OncewardError):
    """What a consumer needs is down, and a run that ends when its source is empty cannot wait for that."""


class ConsumerHeld(Postponed):
    """The consumer is held: this message is not started, or failed because of the outage. Nothing is counted."""

    quiet: ClassVar[bool] = True


class OutageProbe(msgspec.Struct):
    """A try, and its lease."""

    tokens: dict[str, int]
    """By what is down."""
    kept_at: float
    transaction: Transaction
    settled: bool = False
    """Whether it can be reported. Without `succeeded` or `failed`, it did not happen."""
    succeeded: bool = False
    failed: bool = False
    subject: str | None = None
    """What the failure says is down, if it says that."""
    reason: str | None = None
    not_before: float = 0.0
    """Seconds that the service asks to wait."""


class FailureRules(ObservingMiddleware, StepObserver):
    """Sorts failures by their rules, and waits out what the handler needs."""

    name = "failure rules"

    def __init__(
        self,
        book: RuleBook,
        board: Board,
        records: HoldRecords,
        app: str,
        consumer: Identity,
        let_go: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`let_go` gives back what waits nearer to the source: it is not asked while the consumer is held."""
        self._book = book
        self._let_go = let_go
        self._board = board
        self._records = records
        self._app, self._consumer = app, consumer
        self._subjects = subjects_of(app, consumer, book.depends_on)
        self._own = self._subjects[0]
        self._probe: OutageProbe | None = None
        self._draining = False
        board.watch(consumer, self._subjects)

    def bind(self, task: Any) -> Middleware:
        self._now = task.clock.now
        self._nap = 0.0 if task.clock.stands_still else NAP
        self._draining = task.draining
        return self

    async def begin(self) -> None:
        try:
            await self._records.introduce(self._consumer)
            await self._look()
        except Exception as error:  # noqa: BLE001  the database may be away; the inbox waits for it
            self._board.note_trouble(error)

    async def end(self) -> None:
        if self._probe is not None:
            self._probe.settled = True
        await self._keep_in_step()

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────

    def observer(self, step: StepInfo) -> StepObserver | None:
        return self if step.name == "process" else None

    def begins(self, transaction: Transaction) -> None:
        if self._board.active and self._is_held(transaction):
            raise ConsumerHeld("its consumer is held", RETURN.delay())

    def returned(self, transaction: Transaction, note: Any, result: Any) -> None:
        if (self._board.streaks or self._probe is not None) and result is not DUPLICATE:
            self._note_success(transaction)

    def raised(self, transaction: Transaction, note: Any, error: Exception) -> Exception:
        return postponement_of(error) or self._judge(transaction, error)

    def _is_held(self, transaction: Transaction | None = None) -> bool:
        if self._consumer in self._board.paused:
            return True
        if transaction is not None and self._probe is not None and self._probe.transaction is transaction:
            return False
        return any(subject in self._board.down for subject in self._subjects)

    def _note_success(self, transaction: Transaction) -> None:
        self._board.break_streaks(self._subjects)
        probe = self._probe
        if probe is not None and probe.transaction is transaction:
            probe.succeeded = probe.settled = True
            self._board.end(list(probe.tokens))

    def _judge(self, transaction: Transaction, error: Exception) -> Exception:
        """What the engine gets instead of this error."""
        try:
            rule = self._book.rule_for(error)
        except Exception as broken:  # noqa: BLE001  a predicate of user code
            _log.error("a failure rule of %s failed, and is ignored: %s", self._consumer[1], text_of(broken))
            rule = None
        probe = self._probe
        is_probe = probe is not None and probe.transaction is transaction
        if isinstance(rule, OutageRule):
            return self._judge_outage(transaction, error, rule, probe if is_probe else None)
        if is_probe and probe is not None:
            probe.failed = probe.settled = True  # it says nothing about what is down
        if isinstance(rule, BusinessRule):
            return TransactionException(text_of(error), ExceptionCategory.BUSINESS, cause=error)
        asked = _asked_by(error)
        if rule is not None:
            return _redelivered(error, msgspec.structs.replace(rule.redelivery, not_before=asked))
        if asked and not isinstance(error, TransactionException):
            return _redelivered(error, RedeliveryPlan(not_before=asked))
        return error

    def _judge_outage(
        self, transaction: Transaction, error: Exception, rule: OutageRule, probe: OutageProbe | None
    ) -> Exception:
        dependency = self._book.dependency_of(rule)
        subject = self._own if dependency is None else f"{DEPENDENCY}{dependency}"
        rule = self._book.complete(rule)
        asked = _asked_by(error)
        if probe is not None:
            if subject != self._own:
                probe.subject = subject
                if subject not in probe.tokens:
                    self._count(transaction, error, subject, rule, asked)
            probe.reason, probe.not_before = text_of(error), asked
            probe.failed = probe.settled = True
            return ConsumerHeld("the probe failed", self._after_probe(probe, asked))
        if subject in self._board.down or self._count(transaction, error, subject, rule, asked):
            return ConsumerHeld(f"{shown(subject)} is down", RETURN.delay())
        return _redelivered(error, RedeliveryPlan(not_before=asked)) if asked else error

    def _count(
        self, transaction: Transaction, error: Exception, subject: str, rule: OutageRule, asked: float
    ) -> bool:
        """Count a failure. Returns whether it makes an outage."""
        if not self._board.count(subject, transaction.id, rule.after):
            return False
        reason = f"{rule.after} messages in a row failed, the last with {text_of(error)}"
        if rule.after == 1:
            reason = text_of(error)
        self._board.find(NewOutage(subject, reason, max(rule.interval.delay(), asked)))
        return True

    def _after_probe(self, probe: OutageProbe, asked: float) -> float:
        """The delay of a message whose probe failed."""
        subjects = list(probe.tokens)
        probes = max(
            (self._board.down[each].probes for each in subjects if each in self._board.down), default=0
        )
        interval = max(map(self._interval, subjects), default=1.0)
        return max(LATER * interval, min(probes / 2 * interval, LATEST), asked)

    def _interval(self, subject: str) -> float:
        """Seconds from a failed probe to the next."""
        known = self._book.dependencies.get(shown(subject)) if subject.startswith(DEPENDENCY) else None
        rule = known or self._rule_of_consumer()
        down = self._board.down.get(subject)
        return rule.interval.delay(1 + (0 if down is None else down.probes))

    def _rule_of_consumer(self) -> OutageRule:
        """The rule by which an outage of the consumer alone is probed."""
        own = [*self._book.own.values(), *self._book.of_app.values()]
        rules = (
            each for each in own if isinstance(each, OutageRule) and each.of not in self._book.depends_on
        )
        return self._book.complete(next(rules, OutageRule()))

    # ── the source ──────────────────────────────────────────────────────────────────────────────────────

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        async def fetch(size: int, **extra: Any) -> Sequence[Transaction]:
            await self._keep_in_step()
            if not self._board.active or not self._is_held():
                return await source.fetch(size, **extra)
            paused = self._consumer in self._board.paused
            is_due = self._is_due() and not paused
            if self._let_go is not None and not is_due:
                await self._let_go()
            if paused:
                await sleep(self._nap)  # a policy may ask again at once
                return ()
            if is_due and (batch := await source.fetch(1, **extra)):
                try:
                    await self._try_with(batch[0])
                except BaseException:  # it was canceled: nobody else has the message
                    if source.settle is not None:
                        await source.settle([Settlement(each, Verdict.RETURNED) for each in batch])
                    raise
                return batch
            if self._draining:
                raise DependencyDown(self.explain() or "what it needs is down")
            await sleep(self._nap)
            return ()

        async def settle(settlements: Sequence[Settlement]) -> None:
            assert source.settle is not None
            await source.settle(settlements)
            probe = self._probe
            if probe is not None:
                for settlement in settlements:
                    if settlement.transaction is probe.transaction:
                        probe.settled = True
                        probe.failed |= settlement.verdict is Verdict.FAILED
                await self._keep_in_step()

        async def extend(transactions: Sequence[Transaction]) -> None:
            assert source.extend is not None
            await source.extend(transactions)
            await self._keep_in_step()

        async def wait(seconds: float) -> bool:
            assert source.wait is not None
            await self._keep_in_step()
            is_due = self._consumer not in self._board.paused and self._is_due()
            if not self._board.active or not self._is_held() or is_due:
                return await source.wait(min(seconds, LOOK))
            await sleep(min(seconds, NAP))
            await self._keep_in_step()
            return not self._is_held() or self._is_due()

        return source.replace(
            fetch=fetch,
            settle=None if source.settle is None else settle,
            extend=None if source.extend is None else extend,
            wait=None if source.wait is None else wait,
        )

    # ── the records ─────────────────────────────────────────────────────────────────────────────────────

    async def _keep_in_step(self) -> None:
        """Write what happened here, and read what happened elsewhere, if it is time."""
        board, probe = self._board, self._probe
        every = LOOK_WHILE_DOWN if board.down else LOOK
        if not board.found and probe is None and self._now() - board.read_at < every:
            return
        try:
            if probe is not None:
                await self._attend(probe)
            if board.found or self._now() - board.read_at >= every:
                await self._look()
        except Exception as error:  # noqa: BLE001  messages go on; what is not written yet is tried again
            board.read_at = self._now()
            board.note_trouble(error)

    async def _look(self, ended: Sequence[str] = ()) -> None:
        board = self._board
        found, now = list(board.found), self._now()
        board.read_at = now  # the others need not look now
        for each in found:
            await self._records.declare(each.subject, each.reason, each.probe_in)
        board.note(await self._records.read(), now, found, ended)

    async def _attend(self, probe: OutageProbe) -> None:
        """Report a probe that has ended, or keep the lease of one that has not."""
        if not probe.settled:
            if self._now() - probe.kept_at >= LEASE / 4:
                probe.kept_at = self._now()
                for subject, token in probe.tokens.items():
                    await self._records.keep_probe(subject, token, LEASE)
            return
        for subject, token in probe.tokens.items():
            if probe.succeeded:
                await self._records.end(subject, token)
            elif probe.failed:
                concerned = probe.subject in (None, subject)
                wait = max(self._interval(subject), probe.not_before if concerned else 0.0)
                await self._records.fail_probe(subject, token, probe.reason if concerned else None, wait)
            else:
                await self._records.release_probe(subject, token)
        await self._look(ended=list(probe.tokens))
        self._probe = None

    def _is_due(self) -> bool:
        """Whether the next probe is due, and nobody makes it, by what was last read."""
        passed = self._now() - self._board.read_at
        down = [self._board.down[each] for each in self._subjects if each in self._board.down]
        return self._probe is None and all(each.due_in <= passed and not each.probing for each in down)

    async def _try_with(self, transaction: Transaction) -> None:
        """Make a message the probe, if nobody else probes. It is given back if it is not, or if it is still held."""
        down = [each for each in self._subjects if each in self._board.down]
        try:
            tokens = await self._records.take_probes({each: self._interval(each) for each in down}, LEASE)
            if tokens is None:
                await self._look()
            else:
                self._probe = OutageProbe(tokens, self._now(), transaction)
        except Exception as error:  # noqa: BLE001  the next look tries again
            self._board.note_trouble(error)

    def explain(self) -> str | None:
        """Why the consumer is held, in words; None if it is not."""
        return hold_of(self._board, self._app, self._consumer, self._book.depends_on).why


def _asked_by(error: BaseException) -> float:
    """The longest wait that a server asks for, in the error or its causes."""
    return max((retry_after_of(each) or 0.0 for each in members_of(error)), default=0.0)


def _redelivered(error: Exception, redelivery: RedeliveryPlan) -> TransactionException:
    """The failure, with what is known of its next delivery."""
    if not isinstance(error, TransactionException):
        error = TransactionException(text_of(error), ExceptionCategory.SYSTEM, cause=error)
    error.redelivery = redelivery
    return error
