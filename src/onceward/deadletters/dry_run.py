"""Predict a redrive: run today's upcasters and handler in a transaction that is rolled back.

Nothing remains: no dedup row, no attempt, no effect. Outside effects are not called; the run of a letter stops at the
first one. Numbers that a database never takes back, such as those of a PostgreSQL sequence, are used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Engine

from onceward._functions import awaiting
from onceward._sync import Raised, as_coroutine, as_function, run_blocking
from onceward.db import SessionError
from onceward.db.transaction import DbTransaction
from onceward.deadletters.row_watch import RowWatch, TableDiff, TableWrites
from onceward.durations import Duration, seconds_of
from onceward.errors import ConfigurationError
from onceward.inbox import sequences
from onceward.inbox.attempts import Start, poisoned, with_token
from onceward.inbox.commits.attempt import too_old
from onceward.inbox.contract import Contract
from onceward.inbox.effects import Claim, in_doubt, key_of, repeated
from onceward.inbox.errors import Breach, Busy, ContractError, EffectError, EffectInDoubtError
from onceward.inbox.event import Digest, Event
from onceward.inbox.evidence.gate import EvidenceGate
from onceward.inbox.ports import AsyncInboxPorts, BlockingInboxPorts, InboxPorts
from onceward.inbox.registry import Registry
from onceward.inbox.sessions.rules import NOT_EFFECTFUL, WRITTEN, has_written
from onceward.inbox.stores import store_of
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Key
from onceward.inbox.upcasters import check_type, upcast
from onceward.task.exceptions import Postponed, postponement_of
from onceward.task.io_guard import IoGuard
from onceward.task.lifecycle import Step, text_of
from onceward.task.mixins.policies import RetryPolicy
from onceward.task.plan import SERVICE
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


class PredictedOutcome(StrEnum):
    """How a redriven letter would end."""

    SUCCEED = "succeed"
    DUPLICATE = "duplicate"
    """It was applied before: resolved, without a second effect."""
    SUPERSEDED = "superseded"
    """A later event of its aggregate was applied before: resolved, without an effect."""
    WAIT = "wait"
    """It would be returned, and delivered again later."""
    EFFECT = "effect"
    """It would call an outside effect. The outcome after that is unknown."""
    BREACH = "breach"
    """It would die again: the event breaches the contract."""
    RAISE = "raise"
    """It would die again: the handler raises."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    transaction_id: str
    outcome: PredictedOutcome
    detail: str = ""
    statements: tuple[TableWrites, ...] = ()
    """What the handler would write, by table."""
    tables: tuple[TableDiff, ...] = ()
    """Rows that would be added and removed, for small tables."""

    @property
    def is_good(self) -> bool:
        return self.outcome not in (PredictedOutcome.BREACH, PredictedOutcome.RAISE)


def dry_run(
    task: Any, transactions: Iterable[Transaction], engine: Engine, *, poison_fixed: bool = False
) -> list[Prediction]:
    """Predict each, one by one. `task` is a consumer with a contract, `engine` connects to the database of its inbox.

    Handlers run under the I/O guard: I/O that bypasses the session is refused. With `poison_fixed`, starts that never
    ended do not count, as in a redrive with it.
    """
    return run_blocking(_DryRun(BlockingInboxPorts(engine), task, poison_fixed).run(transactions))


async def dry_run_async(
    task: Any, transactions: Iterable[Transaction], engine: AsyncEngine, *, poison_fixed: bool = False
) -> list[Prediction]:
    """`dry_run` for an asynchronous task."""
    return await _DryRun(AsyncInboxPorts(engine), task, poison_fixed).run(transactions)


async def predict(
    engine: Engine | AsyncEngine, task: Any, transactions: Iterable[Transaction], consumer: str
) -> list[Prediction]:
    """Predict in the mode of the engine, as if what made poison of them were fixed. Refuses another consumer's task."""
    check_consumer(task, type(task).__name__, consumer)
    ports: InboxPorts = BlockingInboxPorts(engine) if isinstance(engine, Engine) else AsyncInboxPorts(engine)
    return await _DryRun(ports, task, poison_fixed=True).run(transactions)


def check_consumer(task: Any, name: str, consumer: str | None) -> None:
    """Refuse the task of another consumer: what it would do with the letters means nothing."""
    contract = getattr(task, "contract", None)
    if contract is not None and contract.consumer_id != consumer:
        raise ConfigurationError(
            f"{name} is consumer {contract.consumer_id!r}, but the letters belong to {consumer!r}; name the task of "
            "that consumer"
        )


class RolledBack(Exception):
    """Ends every dry run."""


class WouldCall(BaseException):
    """The handler reached an effect. Not an `Exception`, or it would count as a failure of the effect."""


class _DryRun:
    def __init__(self, ports: InboxPorts, task: Any, poison_fixed: bool = False) -> None:
        contract = getattr(task, "contract", None)
        if not isinstance(contract, Contract):
            raise ConfigurationError(
                f"{type(task).__name__} has no contract; a dry run goes through the inbox, so give it a contract"
            )
        if task.asynchronous != ports.asynchronous:
            raise ConfigurationError(
                f"{type(task).__name__} runs in {'asyncio' if task.asynchronous else 'threads'}; use dry_run for "
                "threads, dry_run_async for asyncio"
            )
        self._ports = ports
        self._contract = contract
        self._outbox = getattr(task, "outbox", None)
        self._order = getattr(task, "order_rule", None)
        self._limit_keys = getattr(task, "limit_keys", None)
        self._code = type(task)
        self._poison_fixed = poison_fixed
        self._store: Store = store_of(ports.dialect)
        own = getattr(task.services.get(SERVICE), "gate", None)
        self._gate: EvidenceGate = own or EvidenceGate.from_environment(self._store)
        self._process = _guarded_handler(task)

    async def run(self, transactions: Iterable[Transaction]) -> list[Prediction]:
        await Registry(self._store, self._ports, self._gate).check(self._contract, self._code)
        return [await self.predict(transaction) for transaction in transactions]

    async def predict(self, transaction: Transaction) -> Prediction:
        """Process it as the inbox does, up to the commit."""
        watch = RowWatch()
        try:
            outcome, detail = await self._attempt(transaction, watch)
        except ContractError as error:
            outcome, detail = PredictedOutcome.BREACH, f"{error.kind}: {error.message}"
        except Postponed as error:
            outcome, detail = PredictedOutcome.WAIT, str(error)
        except sequences.OutOfTurn as early:
            outcome, detail = (
                PredictedOutcome.WAIT,
                f"number {early.expected} of its aggregate has not arrived yet",
            )
        except WouldCall as effect:
            outcome, detail = PredictedOutcome.EFFECT, str(effect)
        except Raised as carried:
            outcome, detail = _predict_failure(carried.raised)
        except Exception as error:  # noqa: BLE001  the other letters must still be predicted
            outcome, detail = _predict_failure(error)
        return Prediction(
            transaction_id=transaction.id,
            outcome=outcome,
            detail=detail,
            statements=watch.changes(),
            tables=tuple(watch.diffs),
        )

    async def _attempt(self, transaction: Transaction, watch: RowWatch) -> tuple[PredictedOutcome, str]:
        if self._limit_keys is not None:
            _check_key("", self._limit_keys.key_of, transaction.payload, transaction.id)
        event = Event.of(transaction)
        check_type(self._contract, event)
        digest = event.digest
        key = Key(self._contract.consumer_id, event.tracking_id, event.day)
        current = upcast(self._contract, event)
        session: Any = self._ports.session()
        await session.port.enter()
        try:
            before = await session.apply(self._check_inbox, key, digest, current)
            if isinstance(before, PredictedOutcome):
                return before, ""
            if self._order is not None:
                _check_key("it has no key for order_by: ", self._order.find_key, transaction, transaction.id)
            current = with_token(current, Start(before))
            session.event = current
            if self._outbox is not None:
                session.sends = self._outbox.in_handler(current, key.consumer_id)
            refused: list[ContractError] = []
            session.effect = self._effect(session, Claim(key, before), refused)
            await session.apply(watch.begin)
            try:
                await self._ports.call(self._handler(transaction), current, session)
            finally:
                if refused:  # also if the handler caught it
                    raise refused[0]
            await session.apply(watch.end)
            return PredictedOutcome.SUCCEED, ""
        finally:
            await session.port.leave(RolledBack())

    def _check_inbox(
        self, transaction: DbTransaction, key: Key, digest: Digest, event: Event
    ) -> PredictedOutcome | int:
        """Return how it ends before the handler runs, or the number that its start would have."""
        store, contract = self._store, self._contract
        found = store.look_up(transaction, key)
        if found.digest is not None:
            if found.digest in digest:
                return PredictedOutcome.DUPLICATE
            raise ContractError(
                "it was done before with another payload or event type", Breach.CONFLICT, key.tracking_id
            )
        if found.floor_day is not None and key.day < found.floor_day:
            raise ContractError(too_old(key, found.floor_day), Breach.TOO_OLD, key.tracking_id)
        attempts = store.attempts(transaction, key)
        if attempts.locked or not store.lock(transaction, f"{key.consumer_id}:{key.tracking_id}"):
            raise Busy("another copy of it is in flight")
        if attempts.unended >= contract.poison_after and not self._poison_fixed:
            raise poisoned(key, attempts.unended)
        if contract.sequencing != "none":
            turn = sequences.take_turn(transaction, store, contract, key, event)
            if turn is sequences.Turn.SUPERSEDED:
                return PredictedOutcome.SUPERSEDED
        return attempts.starts + 1

    def _handler(self, transaction: Transaction) -> Callable[..., Any]:
        def handle(event: Event, session: Any) -> Any:
            shown = transaction
            if event.payload is not transaction.payload:
                shown = msgspec.structs.replace(transaction, payload=event.payload)
            return self._process(shown, session)

        return handle

    def _effect(self, session: Any, claim: Claim, refused: list[ContractError]) -> Callable[..., Any]:
        """Replace the session's own `effect`. Adds the errors that end an attempt even if they are caught."""

        used: set[str] = set()

        def find_result(
            transaction: DbTransaction, name: str, reconciles: bool, valid_for: Duration | None
        ) -> Any:
            if self._contract.mode != "effectful":
                raise EffectError(NOT_EFFECTFUL)
            if has_written(transaction):
                raise SessionError(WRITTEN)
            tracking_id = claim.key.tracking_id
            if name in used:
                refused.append(repeated(name, tracking_id))
                raise refused[-1]
            used.add(name)
            known = self._store.effect(transaction, claim.key, name)
            if known is None:
                raise WouldCall(f"would call effect {name!r} with key {key_of(claim, name)}")
            if known.state == "done":
                return msgspec.msgpack.decode(known.result or b"")
            if known.state == "refused":
                raise WouldCall(f"would call effect {name!r} again, because it was refused, with a new key")
            if valid_for is not None:
                known = known.shortened(seconds_of(valid_for, "key_valid_for"))
            if known.expired and not reconciles:
                refused.append(EffectInDoubtError(in_doubt(name, tracking_id, known), tracking_id))
                raise refused[-1]
            what = "ask reconcile about" if reconciles else "call"
            raise WouldCall(
                f"would {what} effect {name!r} again, because its outcome is in doubt, with key {known.key}"
            )

        if self._ports.asynchronous:

            async def effect_async(
                name: str, call: Any, *, reconcile: Any = None, key_valid_for: Any = None, **_: Any
            ) -> Any:
                return await session.apply(find_result, name, reconcile is not None, key_valid_for)

            return effect_async

        def effect(
            name: str, call: Any, *, reconcile: Any = None, key_valid_for: Any = None, **_: Any
        ) -> Any:
            return session.run(find_result, name, reconcile is not None, key_valid_for)

        return effect


def _guarded_handler(task: Any) -> Callable[..., Any]:
    method = task.process_transaction
    guard = IoGuard(task, raises=True)
    step = Step.of("process", "process", method, RetryPolicy())
    if task.asynchronous:
        return guard.wrap_step(step, awaiting(method))
    return as_function(guard.wrap_step(step, as_coroutine(method)))


def _check_key(problem: str, find: Callable[[Any], Any], given: Any, id: str) -> None:
    """Refuse an event without the key by which its consumer keeps order or is limited, as it does."""
    try:
        find(given)
    except Exception as error:
        raise ContractError(f"{problem}{error}", Breach.ENVELOPE, id) from error


def _predict_failure(error: BaseException) -> tuple[PredictedOutcome, str]:
    if isinstance(error, ContractError):
        return PredictedOutcome.BREACH, f"{error.kind}: {error.message}"
    if postponed := postponement_of(error):
        return PredictedOutcome.WAIT, text_of(postponed)
    return PredictedOutcome.RAISE, text_of(error)
