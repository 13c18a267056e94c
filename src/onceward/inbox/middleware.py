"""The inbox as middleware: records the starts of a fetched batch together, and runs each attempt in a session."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from onceward._coroutines import all_awaited, ending
from onceward._sync import Raised
from onceward.errors import ConfigurationError
from onceward.inbox.attempts import End, Start
from onceward.inbox.commits.attempt import EventAttempt
from onceward.inbox.commits.batch import BatchCommit, BatchCommits
from onceward.inbox.commits.group import CommitGroup, GroupCommits, check_commit, commit_of
from onceward.inbox.contract import Contract
from onceward.inbox.errors import ContractError, Parked
from onceward.inbox.event import Event
from onceward.inbox.evidence.code_digest import OURS
from onceward.inbox.metrics import metrics_of
from onceward.inbox.result import Result
from onceward.inbox.sequences import ParkedEvents
from onceward.inbox.sessions.acknowledgment import JointSource
from onceward.inbox.stores.types import Key
from onceward.middleware import Middleware, SourceCalls, StepCall, StepInfo
from onceward.task.call import NOT_DEFINED
from onceward.task.exceptions import postponement_of
from onceward.task.guards.receipt import sign
from onceward.task.work import DUPLICATE
from onceward.telemetry.context import current_work
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

if TYPE_CHECKING:
    from onceward.inbox.processor import EventProcessor
    from onceward.inbox.registry import Registry

_log = OwnLogger(logging.getLogger("onceward.inbox"))


class Expected(msgspec.Struct, frozen=True):
    """A fetched transaction whose start has been recorded."""

    transaction: Transaction
    """Kept, so no other object gets its `id()` meanwhile."""
    event: Event
    key: Key
    start: Start


class InboxMiddleware(Middleware):
    """Enforces the contract: each event once, its record in one transaction with the handler's writes."""

    keeps_contract = True
    name = "inbox"

    def __init__(self, processor: EventProcessor, registry: Registry) -> None:
        self._processor = processor
        self._registry = registry

    def bind(self, task: Any) -> Middleware:
        contract = task.contract
        if not isinstance(contract, Contract):
            raise ConfigurationError(
                f"the contract of {task.name} must be a Contract(…), not {type(contract).__name__}"
            )
        if getattr(task, "outbox", None) is not None:
            self._processor.outbox = task.outbox
        # An acknowledgment must not come before the end of the success handler.
        joins = getattr(task.handle_transaction_success, "__func__", None) in NOT_DEFINED
        commit = getattr(task, "commit", None)
        check_commit(commit, contract, task.name)
        how = commit_of(task, contract, self._processor.store.name)
        return ContractKeeper(
            self._processor, self._registry, contract, _code_of(task), joins=joins, commit=how
        )


def _code_of(task: Any) -> type[Any]:
    """The class of a task; with the middleware and the way to commit that this instance got, if they are others."""
    cls = type(task)
    known = {type(each).__module__ for each in cls.middleware}
    given = {type(each).__module__ for each in task.middleware} - known
    commit = getattr(task, "commit", None)
    if all(name.partition(".")[0] == OURS for name in given) and commit == getattr(cls, "commit", None):
        return cls
    body = {
        "middleware": task.middleware,
        "commit": commit,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (cls,), body)


def _with_payload_of(transaction: Transaction, event: Event) -> Transaction:
    """The transaction as the handler gets it."""
    if event.payload is transaction.payload:
        return transaction
    changed: Transaction = transaction.__copy__()  # type: ignore[attr-defined]  # not `replace`: it checks all fields
    msgspec.structs.force_setattr(changed, "payload", event.payload)
    return changed


class ContractKeeper(Middleware):
    """One call of one consumer."""

    keeps_contract = True
    name = "inbox"

    def __init__(
        self,
        processor: EventProcessor,
        registry: Registry,
        contract: Contract,
        code: type[Any],
        *,
        joins: bool,
        commit: str,
    ) -> None:
        self._processor = processor
        self._registry = registry
        self._contract = contract
        self._code = code
        self._metrics = metrics_of(contract.consumer_id)
        self._expected: dict[int, Expected] = {}
        self._joins = joins
        self._source = JointSource(None)
        self._parked = ParkedEvents()
        self._batches = commit == "batch"
        self._call: StepCall
        self.grouping = None
        if commit == "group":
            self.grouping = GroupCommits(processor, self._expected)
        elif commit == "batch":
            self.grouping = BatchCommits(processor, self._expected, self._attempt_of, self._handle_batch)

    async def begin(self) -> None:
        await self._registry.check(self._contract, self._code)

    async def end(self) -> None:
        """Record the end of everything that was fetched but never begun."""
        left = [self._expected.pop(key, None) for key in list(self._expected)]
        await self._processor.ledger.end(
            [End(each.key, each.start.token, "the call ended before it began") for each in left if each]
        )

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        if step.name != "process":
            return call
        self._call = call
        sequenced = self._contract.sequencing != "none"
        run_in = self._run_in_batch if self._batches else self._run_in_group

        async def process(transaction: Transaction) -> Any:
            unit = getattr(current_work.get(), "unit", None)
            event = self._event_of(transaction) if sequenced else None
            try:
                if unit is None:
                    result = await self._process(transaction)
                else:
                    result = await run_in(unit, transaction)
            except Parked:
                if event is not None:
                    self._parked.park(event, transaction)
                raise
            except Raised as carried:
                if isinstance(carried.raised, StopIteration):
                    raise
                raised = carried.unwrap()
            else:
                if event is not None:
                    self._parked.done(event)
                sign(self)
                return result.value if result.done else DUPLICATE
            raise raised

        return process

    async def _process(self, transaction: Transaction) -> Result:
        attempt = self._attempt_of(transaction)
        self._expected.pop(id(transaction), None)
        return await self._processor.process(attempt)

    async def _run_in_batch(self, batch: BatchCommit, transaction: Transaction) -> Result:
        await batch.run()
        return batch.result_of(transaction)

    def _run_in_group(self, group: CommitGroup, transaction: Transaction) -> Coroutine[Any, Any, Result]:
        attempt = self._attempt_of(transaction)
        if attempt.start is None:
            raise group.leave_out(transaction)  # its start has to be recorded first, or it must run alone
        return group.run(attempt, transaction)

    def _attempt_of(self, transaction: Transaction) -> EventAttempt:
        """An attempt with the start that was recorded for it, if one was."""

        def handle(current: Event, session: Any) -> Coroutine[Any, Any, Any]:
            given = _with_payload_of(transaction, current)
            return self._handle([given] if self._batches else given, session)

        expected = self._expected.get(id(transaction))
        work: Any = current_work.get()
        attempt = EventAttempt(
            self._contract,
            Event.of(transaction) if expected is None else expected.event,
            handle,
            metrics=self._metrics,
            key=None if expected is None else expected.key,
            start=None if expected is None else expected.start,
            departure=self._source.departure_of(transaction),
            traced=work is None or work.plan.watch is not None,
        )
        attempt.transaction = transaction
        return attempt

    def _event_of(self, transaction: Transaction) -> Event:
        expected = self._expected.get(id(transaction))
        return Event.of(transaction) if expected is None else expected.event

    async def _handle_batch(self, attempts: Sequence[EventAttempt], session: Any) -> Any:
        await self._handle([_with_payload_of(each.transaction, each.event) for each in attempts], session)

    async def _handle(self, given: Any, session: Any) -> Any:
        try:
            with all_awaited():
                return await ending(self._call(given, session))
        except Raised:
            raise
        except Exception as error:
            raise Raised(postponement_of(error) or error) from error

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        ledger, availability = self._processor.ledger, self._processor.availability
        if hasattr(source.connector, "leave_poison_to_inbox"):
            source.connector.leave_poison_to_inbox()
        if any(hasattr(source.connector, f"hasten_transactions{suffix}") for suffix in ("", "_async")):
            self._parked.use(partial(source.ask, "hasten_transactions"))
        rules = getattr(source.connector, "rules", None)
        if rules is not None and self._contract.tolerates is not None:
            remedy = "give its connector more deliveries, or a longer redelivery_delay"
            rules.check_patience(self._contract.consumer_id, self._contract.tolerates, "its source", remedy)
        if self._joins:
            self._source = JointSource(source.connector)

        async def fetch(size: int, **extra: Any) -> Sequence[Transaction]:
            if availability.in_doubt:
                await availability.check(self._contract.consumer_id)
            batch = await source.fetch(size, **extra)
            await self._expect(batch or ())
            if batch:
                await self._source.find_out(self._processor.ports)
            return batch

        async def settle(settlements: Sequence[Settlement]) -> None:
            assert source.settle is not None
            await source.settle(self._parked.hastened(settlements))
            await self._parked.call_up()
            await ledger.end(self._not_begun(settlements))

        async def extend(transactions: Sequence[Transaction]) -> None:
            assert source.extend is not None
            await source.extend(transactions)
            if self._contract.mode == "transactional":
                try:
                    await ledger.extend(self._contract, [Event.of(each).tracking_id for each in transactions])
                except Exception as error:  # noqa: BLE001  a copy elsewhere still gets Busy
                    _log.warning("cannot extend the leases of %d starts: %s", len(transactions), error)

        return source.replace(
            fetch=fetch,
            settle=None if source.settle is None else settle,
            extend=None if source.extend is None else extend,
        )

    async def _expect(self, batch: Sequence[Transaction]) -> None:
        """Record the starts of a batch. If that fails, each event records its own when its turn comes."""
        seen: list[tuple[Transaction, Event, Key]] = []
        consumer_id = self._contract.consumer_id
        # An effectful event records its start, which is its claim, when its turn comes.
        for transaction in batch if self._contract.mode == "transactional" else ():
            try:
                event = Event.of(transaction)
                key = Key(consumer_id, event.tracking_id, event.day)
            except ContractError:
                continue  # it is refused when its turn comes
            seen.append((transaction, event, key))
        try:
            starts = await self._processor.ledger.expect(self._contract, [key for _, _, key in seen])
        except Exception as error:  # noqa: BLE001
            if not self._processor.availability.is_to_blame(error):  # each event reports this itself
                _log.warning("cannot record the starts of a batch together: %s", error)
            return
        for transaction, event, key in seen:
            start = starts.pop(key.tracking_id, None)
            if start is not None:
                self._expected[id(transaction)] = Expected(transaction, event, key, start)

    def _not_begun(self, settlements: Sequence[Settlement]) -> list[End]:
        """Return the ends of what was fetched and returned to the source unprocessed."""
        ends = []
        for settlement in settlements:
            if settlement.verdict is Verdict.RETURNED:
                expected = self._expected.pop(id(settlement.transaction), None)
                if expected is not None:
                    ends.append(
                        End(expected.key, expected.start.token, "returned to the source before it began")
                    )
        return ends
