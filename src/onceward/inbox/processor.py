"""How the inbox processes one event, for threads and asyncio.

    event ─► contract: type, schema ─► start recorded ─► session ─► dedup row
              └─ ContractError          ├─ POISON         └─ Busy     ├─ new ─► handler ─► commit: DONE
                                        └─ Busy                       ├─ already there ─► DUPLICATE
                                                                      ├─ other content, too old ─► ContractError
                                                                      └─ in flight elsewhere ─► Busy

In `transactional` mode the dedup row is written first and commits with the handler's writes. In `effectful` mode a
claim with a lease keeps other workers away while nothing is locked, and the dedup row commits with the handler's writes
at the end, if the claim is still ours.

An event that must not be acknowledged always raises: `Busy` or `Parked` for later, `ContractError` for never.
"""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from opentelemetry import trace
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from onceward._process.forks import UserCode
from onceward._sync import Raised
from onceward.db import LockTimeoutError, SessionError
from onceward.db.backends import backend_of
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError, FileLostError
from onceward.inbox import sequences
from onceward.inbox.attempts import AttemptLedger, Company, End, Start, poisoned, with_token
from onceward.inbox.availability import Availability
from onceward.inbox.contract import Contract
from onceward.inbox.effects import Claim, Heartbeat, Ledger
from onceward.inbox.errors import AT_ONCE, LATER, SOON, Breach, Busy, ContractError, LeaseLostError, Parked
from onceward.inbox.event import Digest, Event
from onceward.inbox.metrics import InboxMetrics, SeenFailures, metrics_of
from onceward.inbox.ports import InboxPorts, Session
from onceward.inbox.result import DONE, DUPLICATE, SUPERSEDED, Result
from onceward.inbox.sequences import OutOfTurn
from onceward.inbox.sessions.acknowledgment import Departure
from onceward.inbox.sessions.rules import Sends
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Key, MissingDay, as_date
from onceward.inbox.upcasters import check_type, upcast
from onceward.storage.database import SERIALIZATION_PAUSE, SERIALIZATION_RETRIES
from onceward.task.exceptions import AttemptInterrupted, Postponed
from onceward.task.lifecycle import text_of
from onceward.telemetry.context import current_work
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.redaction import scrub
from onceward.telemetry.safety import quietly

_log = OwnLogger(logging.getLogger("onceward.inbox"))

ENDS = (Exception, CancelledError, AttemptInterrupted)
"""Exceptions that end an attempt. Any other leaves it without an end, as a crash does."""

IN_FLIGHT = "another copy of it is in flight"

Handler = Callable[[Event, Any], Awaitable[Any]]
"""Wraps exceptions of user code in `Raised`."""


class HandlerOutbox(Protocol):
    """An outbox, as an inbox uses it."""

    def in_handler(self, event: Event, consumer_id: str) -> Sends: ...


class EventProcessor:
    def __init__(self, store: Store, ports: InboxPorts) -> None:
        self.store = store
        self.ports = ports
        self.ledger = AttemptLedger(store, ports)
        self.heartbeat = Heartbeat(store, ports)
        self._backend = backend_of(ports.dialect)
        self._days: set[int] = set()
        self.availability = Availability(store, ports)
        self._failures = SeenFailures()
        self.outbox: HandlerOutbox | None = None
        """What handlers publish through."""

    async def process(
        self,
        contract: Contract,
        event: Event,
        handler: Handler,
        metrics: InboxMetrics | None,
        start: Start | None = None,
        departure: Departure | None = None,
    ) -> Result:
        """Make one attempt. `start` was recorded with the batch; without it, one is recorded now. With `departure`, the
        event leaves its queue in the same transaction."""
        began = time.perf_counter()
        describe_span(contract, event)
        key = Key(contract.consumer_id, event.tracking_id, event.day)
        try:
            if event.event_type not in contract.event_types:
                check_type(contract, event)
            digest = event.digest
            if start is None:
                start = await self.reachable(self.ledger.start, contract, key, Company.ALL)
            if start is None:
                start = await self._start_alone(contract, key)
            else:
                await self._enter(Company.ALL)
            try:
                current = event
                if contract.model is not None or event.schema_version != contract.schema_version:
                    with UserCode(f"an upcaster or the model of {contract.consumer_id}"):
                        current = upcast(contract, event)
                if current.lock_token is None:
                    current = with_token(current, start)
                result = await self._attempts(contract, key, digest, current, handler, start, departure)
                if departure is not None:
                    departure.committed()
            finally:
                self.ports.gate.leave()
        except ENDS as error:
            raised = error.raised if isinstance(error, Raised) else error
            if metrics is not None:
                metrics.count_failure(contract, event, raised, began)
            log_failure(contract, event, raised, start)
            if start is not None:
                await self.ledger.end([End(key, start.token, text_of(raised))])
            raise
        if contract.mode == "effectful" and result.handling is DONE:
            self.ledger.release(key)
        else:
            self.ledger.finish(key)
        self.availability.event_done()
        if metrics is not None:
            metrics.count(contract, event, result.handling, start.token - 1, began)
        return result

    async def _enter(self, company: Company) -> None:
        if not await self.ports.gate.enter(company):
            # All others have waited meanwhile: one that a long event keeps out must not come back soon.
            delay = 60.0 if company is Company.NONE else 5.0
            raise Busy("it must run alone, and other events did not finish in time", delay=delay)

    async def _start_alone(self, contract: Contract, key: Key) -> Start:
        """Let a suspect in, with the company that its earlier starts leave it, and record its start."""
        if not await self.reachable(self.ports.transact, self._is_free, key):
            raise Busy(IN_FLIGHT, delay=AT_ONCE.delay())  # it would wait for the other copy to make room
        # With a limit of two, the second start is the last one.
        for company in (Company.OTHER_INBOXES, Company.NONE)[contract.poison_after <= 2 :]:
            await self._enter(company)
            try:
                start: Start | None = await self.reachable(self.ledger.start, contract, key, company)
            except BaseException:
                self.ports.gate.leave()
                raise
            if start is not None:
                return start
            self.ports.gate.leave()
        raise AssertionError("alone in its process it is started, busy or poison")

    async def join(self, contract: Contract, event: Event, handler: Handler, session: Session) -> Result:
        """Make one attempt inside the caller's session, which the caller commits. The source has to count starts."""
        began = time.perf_counter()
        metrics = metrics_of(contract.consumer_id)
        describe_span(contract, event)
        key = Key(contract.consumer_id, event.tracking_id, event.day)
        try:
            check_type(contract, event)
            if event.deliveries is not None and event.deliveries > contract.poison_after:
                # Its effects may be committed, and only the acknowledgments lost.
                if await session.apply(self._is_done, key, event.digest):
                    return Result(DUPLICATE)
                raise poisoned(key, event.deliveries - 1)
            await self._prepare(key)
            if contract.mode == "effectful":
                raise ConfigurationError(
                    f"consumer {contract.consumer_id!r} has outside effects (mode='effectful') and cannot run inside "
                    "an open session; call process without a session"
                )
            current = upcast(contract, event)
            result = await self._in_transaction(contract, key, event.digest, current, handler, session)
        except OutOfTurn as early:
            parked = Parked(f"number {early.expected} of its aggregate has not arrived yet", delay=1.0)
            if metrics is not None:
                metrics.count_failure(contract, event, parked, began)
            raise parked from None
        except MissingDay as missing:
            self._days.discard(missing.day)
            raise SessionError(
                f"the partition for events of {as_date(missing.day)} has just been removed; deliver the event again"
            ) from missing
        except Exception as error:
            raised = error.raised if isinstance(error, Raised) else error
            if metrics is not None:
                metrics.count_failure(contract, event, raised, began)
            if not isinstance(raised, Postponed):
                self._failures.note(key)
            log_failure(contract, event, raised, None)
            raise
        # The source knows earlier deliveries, this process earlier attempts at the same one.
        retries = max((event.deliveries or 1) - 1, self._failures.forget(key))
        if metrics is not None:
            metrics.count(contract, event, result.handling, retries, began)
        return result

    async def _attempts(
        self,
        contract: Contract,
        key: Key,
        digest: Digest,
        event: Event,
        handler: Handler,
        start: Start,
        departure: Departure | None,
    ) -> Result:
        """Retry an attempt as long as it only collides with concurrent transactions."""
        once = self._effectful if contract.mode == "effectful" else self._transactional
        made_room = False
        for attempt in range(SERIALIZATION_RETRIES):
            try:
                return await once(contract, key, digest, event, handler, start, departure)
            except OutOfTurn as early:
                waiting = await self.reachable(
                    self.ports.transact, sequences.park, self.store, contract, key, event, early.expected
                )
                raise waiting from None
            except MissingDay as missing:
                if made_room:
                    raise ContractError(too_old(key, None), Breach.TOO_OLD, key.tracking_id) from None
                self._days.discard(missing.day)
                await self._prepare(key)
                made_room = True
            except (DBAPIError, Raised) as error:
                if not self._is_serialization_failure(error):
                    raise
                _log.info("event %s: serialization failure, retrying", key.tracking_id)
                await self.ports.sleep(SERIALIZATION_PAUSE.delay(attempt))
        raise Busy("the database could not serialize it with other transactions", delay=SOON.delay())

    async def _transactional(
        self,
        contract: Contract,
        key: Key,
        digest: Digest,
        event: Event,
        handler: Handler,
        start: Start,
        departure: Departure | None,
    ) -> Result:
        session = self.ports.session()
        session.event = event
        await self.reachable(session.port.enter)
        error: BaseException | None = None
        try:
            result = await self._in_transaction(contract, key, digest, event, handler, session)
            if departure is not None:
                await session.apply(departure.take_off, key, not result.duplicate)
            return result
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self._leave(session.port, error)

    async def _in_transaction(
        self, contract: Contract, key: Key, digest: Digest, event: Event, handler: Handler, session: Session
    ) -> Result:
        if not await self.reachable(session.apply, self.store.admit, key, digest):
            await session.apply(self._refuse, key, digest)
            return Result(DUPLICATE)
        if contract.sequencing != "none":
            turn = await session.apply(sequences.take_turn, self.store, contract, key, event)
            if turn is sequences.Turn.SUPERSEDED:
                return Result(SUPERSEDED)
        if self.outbox is not None:
            session.sends = self.outbox.in_handler(event, key.consumer_id)
        value = await handler(event, session)
        if session.unsettled is not None:
            session.unsettled.check(key.tracking_id)
        return Result(DONE, value)

    def _refuse(self, transaction: DbTransaction, key: Key, digest: Digest) -> None:
        """Return if the event is a duplicate; otherwise raise the reason why it was not admitted."""
        found = self.store.look_up(transaction, key)
        if found.digest is not None:
            if found.digest not in digest:
                raise ContractError(
                    "it was done before with another payload or event type, and an id always stands for one event; "
                    "it was not run again",
                    Breach.CONFLICT,
                    key.tracking_id,
                )
            return
        if found.floor_day is not None and key.day < found.floor_day:
            raise ContractError(too_old(key, found.floor_day), Breach.TOO_OLD, key.tracking_id)
        raise Busy(IN_FLIGHT, delay=AT_ONCE.delay())

    def _is_free(self, transaction: DbTransaction, key: Key) -> bool:
        """Whether no transaction that does the event is open."""
        return self.store.lock(transaction, f"{key.consumer_id}:{key.tracking_id}")

    async def _effectful(
        self,
        contract: Contract,
        key: Key,
        digest: Digest,
        event: Event,
        handler: Handler,
        start: Start,
        departure: Departure | None,
    ) -> Result:
        if await self.reachable(self.ports.transact, self._is_done, key, digest, departure):
            return Result(DUPLICATE)
        # Before the first effect: after it, a missing partition must not make the attempt fail.
        await self._prepare(key)
        claim = Claim(key, start.token)
        ledger = Ledger(self.store, self.ports, claim, contract.lease)
        session = self.ports.effectful(event, claim, ledger)
        if self.outbox is not None:
            session.sends = self.outbox.in_handler(event, key.consumer_id)
        self.heartbeat.keep(claim, contract.lease)
        error: BaseException | None = None
        try:
            try:
                value = await handler(event, session)
            except Raised as carried:
                ledger.check(carried.raised)
                raise
            ledger.check()
            session.unsettled.check(key.tracking_id)
            await self.reachable(session.apply, self._complete, claim, digest, departure)
            return Result(DONE, value)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.heartbeat.let_go(claim, contract.lease)
            await self._leave(session, error)

    async def _prepare(self, key: Key) -> None:
        day = self.store.partition(key)
        if day is not None and day not in self._days:
            await self.ports.outside(self.store.prepare_day, key)
            self._days.add(day)

    def _is_done(
        self, transaction: DbTransaction, key: Key, digest: Digest, departure: Departure | None = None
    ) -> bool:
        found = self.store.look_up(transaction, key)
        if found.digest is None and (found.floor_day is None or key.day >= found.floor_day):
            return False
        self._refuse(transaction, key, digest)
        if departure is not None:
            departure.remove(transaction)
        return True

    def _complete(
        self, transaction: DbTransaction, claim: Claim, digest: Digest, departure: Departure | None
    ) -> None:
        """Fence the attempt: its row and writes commit only if no other worker has claimed the event since."""
        if self.store.finish(transaction, claim.key, claim.token) and self.store.admit(
            transaction, claim.key, digest
        ):
            if departure is not None:
                departure.take_off(transaction, claim.key)
            return
        raise LeaseLostError(
            f"another worker has claimed event {claim.key.tracking_id}; this attempt commits nothing"
        )

    async def reachable(self, ask: Callable[..., Any], *args: Any) -> Any:
        """Make the first call to the database. If it is locked or unavailable, raise `Busy`: no attempt has failed."""
        try:
            return await ask(*args)
        except LockTimeoutError as error:
            raise Busy("the database is locked", delay=AT_ONCE.delay()) from error
        except PoolTimeout as error:
            raise Busy("all connections of the pool are in use", delay=LATER.delay()) from error
        except (DBAPIError, FileLostError) as error:
            if isinstance(error, DBAPIError) and self._backend.is_lock_timeout(error):
                raise Busy("its row is locked by another transaction", delay=LATER.delay()) from error
            if self.availability.is_to_blame(error):
                raise Busy("the database is not available", delay=LATER.delay()) from error
            raise

    async def _leave(self, session: Any, error: BaseException | None) -> None:
        """End the session. If the database's file is lost, so is the commit, and no attempt has failed."""
        try:
            await session.leave(error)
        except FileLostError as lost:
            self.availability.is_to_blame(lost)
            raise Busy("the file of the database is lost", delay=LATER.delay()) from lost

    def _is_serialization_failure(self, error: DBAPIError | Raised) -> bool:
        cause: BaseException | None = error.raised if isinstance(error, Raised) else error
        while cause is not None:
            if isinstance(cause, DBAPIError) and self._backend.is_serialization_failure(cause):
                return True
            cause = cause.__cause__
        return False


def describe_span(contract: Contract, event: Event) -> None:
    span = trace.get_current_span()
    if span.is_recording():
        quietly(
            span.set_attributes,
            {
                "consumer": contract.consumer_id,
                "tracking_id": event.tracking_id,
                "event_type": event.event_type,
            },
        )


def log_failure(contract: Contract, event: Event, error: BaseException, start: Start | None) -> None:
    """Log everything needed to find the event but nothing of its payload.

    Under an engine it is only logged as info: the engine reports each failure as a warning or an error.
    """
    scrub(error)  # parameters usually contain the payload
    if isinstance(error, Postponed):
        return
    in_engine = current_work.get() is not None
    log = _log.info if in_engine else _log.error
    log(
        "consumer %s: event %s of type %r (aggregate %s, start %s) failed: %s",
        contract.consumer_id,
        event.tracking_id,
        event.event_type,
        event.aggregate_id,
        "-" if start is None else start.token,
        text_of(error),
        exc_info=None if in_engine or isinstance(error, ContractError) else error,
        extra={
            "consumer": contract.consumer_id,
            "tracking_id": event.tracking_id,
            "event_type": event.event_type,
            "aggregate_id": event.aggregate_id or "",
            "sequence": "" if event.sequence is None else event.sequence,
            "schema_version": event.schema_version,
            "lock_token": "" if start is None else start.token,
        },
    )


def too_old(key: Key, floor_day: int | None) -> str:
    floor = "" if floor_day is None else f" ({as_date(floor_day)})"
    return (
        f"it is from {as_date(key.day)}, before the dedup horizon{floor}, so whether it was done before is no longer "
        "known; it is not run"
    )
