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
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from onceward._sync import Raised
from onceward.db import LockTimeoutError, SessionError
from onceward.db.backends import backend_of
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError, FileLostError, with_causes
from onceward.inbox import sequences
from onceward.inbox.attempts import AttemptLedger, Company, End, Start, poisoned
from onceward.inbox.availability import Availability
from onceward.inbox.commits.attempt import EventAttempt, Handler, too_old
from onceward.inbox.contract import Contract
from onceward.inbox.effects import Claim, Heartbeat, Ledger
from onceward.inbox.errors import AT_ONCE, LATER, SOON, Breach, Busy, ContractError, LeaseLostError, Parked
from onceward.inbox.event import Digest, Event
from onceward.inbox.metrics import SeenFailures, metrics_of
from onceward.inbox.ports import InboxPorts, Session
from onceward.inbox.result import DONE, DUPLICATE, SUPERSEDED, Handling, Result
from onceward.inbox.sequences import OutOfTurn
from onceward.inbox.sessions.rules import Sends
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Key, MissingDay, as_date
from onceward.inbox.upcasters import check_type, upcast
from onceward.storage.database import SERIALIZATION_PAUSE, SERIALIZATION_RETRIES
from onceward.task.exceptions import AttemptInterrupted, Postponed
from onceward.task.lifecycle import text_of
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.inbox"))

ENDS = (Exception, CancelledError, AttemptInterrupted)
"""Exceptions that end an attempt. Any other leaves it without an end, as a crash does."""

UNREACHABLE = (LockTimeoutError, PoolTimeout, DBAPIError, FileLostError)
"""What the first call to the database may raise if it is not the event's fault."""

IN_FLIGHT = "another copy of it is in flight"


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

    async def process(self, attempt: EventAttempt) -> Result:
        """Make one attempt. If its start was not recorded with the batch, it is recorded now. With a departure, the
        event leaves its queue in the same transaction."""
        contract, key = attempt.contract, attempt.key
        start = attempt.start
        try:
            attempt.check()
            if start is None:
                start = await self.reachable(self.ledger.start, contract, key, Company.ALL)
            if start is None:
                start = await self._start_alone(contract, key)
            else:
                await self.enter(Company.ALL)
            try:
                attempt.prepare(start)
                result = await self._attempts(attempt)
                if attempt.departure is not None:
                    attempt.departure.committed()
            finally:
                self.ports.gate.leave()
        except ENDS as error:
            attempt.start = start
            await self.failed(attempt, error)
            raise
        self.done(attempt, result)
        return result

    def done(self, attempt: EventAttempt, result: Result) -> None:
        """The attempt is committed."""
        assert attempt.start is not None
        if attempt.contract.mode == "effectful" and result.handling is DONE:
            self.ledger.release(attempt.key)
        else:
            self.ledger.finish(attempt.key)
        self.availability.event_done()
        if attempt.metrics is not None:
            attempt.count(result.handling, attempt.start.token - 1)

    async def failed(self, attempt: EventAttempt, error: BaseException) -> None:
        """The attempt ended without success, if the error is one that ends it."""
        if not isinstance(error, ENDS):
            return
        raised = error.raised if isinstance(error, Raised) else error
        attempt.fail(raised)
        if attempt.start is not None:
            await self.ledger.end([End(attempt.key, attempt.start.token, text_of(raised))])

    async def enter(self, company: Company) -> None:
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
            await self.enter(company)
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
        attempt = EventAttempt(contract, event, handler, metrics=metrics_of(contract.consumer_id))
        key = attempt.key
        try:
            check_type(contract, event)
            attempt.digest = event.digest
            if event.deliveries is not None and event.deliveries > contract.poison_after:
                # Its effects may be committed, and only the acknowledgments lost.
                if await session.apply(self._is_done, attempt):
                    return Result(DUPLICATE)
                raise poisoned(key, event.deliveries - 1)
            await self.prepare_day(key)
            if contract.mode == "effectful":
                raise ConfigurationError(
                    f"consumer {contract.consumer_id!r} has outside effects (mode='effectful') and cannot run inside "
                    "an open session; call process without a session"
                )
            attempt.event = upcast(contract, event)
            result = await self.in_transaction(attempt, session)
        except OutOfTurn as early:
            parked = Parked(f"number {early.expected} of its aggregate has not arrived yet", delay=1.0)
            if attempt.metrics is not None:
                attempt.metrics.count_failure(contract, event, parked, attempt.began)
            raise parked from None
        except MissingDay as missing:
            self._days.discard(missing.day)
            raise SessionError(
                f"the partition for events of {as_date(missing.day)} has just been removed; deliver the event again"
            ) from missing
        except Exception as error:
            raised = error.raised if isinstance(error, Raised) else error
            if not isinstance(raised, Postponed):
                self._failures.note(key)
            attempt.fail(raised)
            raise
        # The source knows earlier deliveries, this process earlier attempts at the same one.
        retries = max((event.deliveries or 1) - 1, self._failures.forget(key))
        attempt.count(result.handling, retries)
        return result

    async def _attempts(self, attempt: EventAttempt) -> Result:
        """Retry an attempt as long as it only collides with concurrent transactions."""
        contract, key = attempt.contract, attempt.key
        once = self._effectful if contract.mode == "effectful" else self._transactional
        made_room = False
        for number in range(SERIALIZATION_RETRIES):
            try:
                return await once(attempt)
            except OutOfTurn as early:
                waiting = await self.reachable(
                    self.ports.transact,
                    sequences.park,
                    self.store,
                    contract,
                    key,
                    attempt.event,
                    early.expected,
                )
                raise waiting from None
            except MissingDay as missing:
                if made_room:
                    raise ContractError(too_old(key, None), Breach.TOO_OLD, key.tracking_id) from None
                self._days.discard(missing.day)
                await self.prepare_day(key)
                made_room = True
            except (DBAPIError, Raised) as error:
                if not self.is_serialization_failure(error):
                    raise
                _log.info("event %s: serialization failure, retrying", key.tracking_id)
                await self.ports.sleep(SERIALIZATION_PAUSE.delay(number))
        raise Busy("the database could not serialize it with other transactions", delay=SOON.delay())

    async def _transactional(self, attempt: EventAttempt) -> Result:
        session = self.ports.session()
        session.event = attempt.event
        await self.reachable(session.port.enter)
        error: BaseException | None = None
        try:
            return await self.in_transaction(attempt, session)
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self.leave(session.port, error)

    async def in_transaction(
        self, attempt: EventAttempt, session: Session, *, letters: bool = True
    ) -> Result:
        result = await self._handle(attempt, session, letters)
        if attempt.departure is not None and not attempt.departure.waits:
            await session.apply(attempt.departure.take_off, attempt.key, not result.duplicate)
        return result

    async def _handle(self, attempt: EventAttempt, session: Session, letters: bool) -> Result:
        handling = await self.admit(attempt, session, letters=letters)
        if handling is not DONE:
            return Result(handling)
        self.let_send(session, attempt)
        value = await attempt.handler(attempt.event, session)
        if session.unsettled is not None:
            session.unsettled.check(attempt.key.tracking_id)
        return Result(DONE, value)

    async def admit(self, attempt: EventAttempt, session: Session, *, letters: bool = True) -> Handling:
        """Write the dedup row; for `letters`, see `Store.admit`. DONE if the handler may run; raises if the event is
        neither new nor a duplicate."""
        contract, key = attempt.contract, attempt.key
        admit = self.store.admit if letters else self.store.admit_only
        try:
            admitted = await session.apply(admit, key, attempt.digest)
        except UNREACHABLE as error:
            meaning: Exception | None = self._busy_for(error)
            if meaning is None and isinstance(error, IntegrityError):
                meaning = self.store.explain(error, key)
            if meaning is None:
                raise
            raise meaning from error
        if not admitted:
            await session.apply(self._refuse, key, attempt.digest)
            return DUPLICATE
        if contract.sequencing != "none":
            turn = await session.apply(sequences.take_turn, self.store, contract, key, attempt.event)
            if turn is sequences.Turn.SUPERSEDED:
                return SUPERSEDED
        return DONE

    def resolve_letters(self, transaction: DbTransaction, attempts: Sequence[EventAttempt]) -> None:
        """Resolve the open dead letters of events that were admitted without that."""
        done = [(each.key.tracking_id, each.digest) for each in attempts]
        self.store.resolve_letters(transaction, attempts[0].key.consumer_id, done)

    def let_send(self, session: Any, attempt: EventAttempt) -> None:
        """Let the handler of this event publish."""
        if self.outbox is not None:
            session.sends = self.outbox.in_handler(attempt.event, attempt.key.consumer_id)

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

    async def _effectful(self, attempt: EventAttempt) -> Result:
        contract, key, event = attempt.contract, attempt.key, attempt.event
        assert attempt.start is not None
        if await self.reachable(self.ports.transact, self._is_done, attempt):
            return Result(DUPLICATE)
        # Before the first effect: after it, a missing partition must not make the attempt fail.
        await self.prepare_day(key)
        claim = Claim(key, attempt.start.token)
        ledger = Ledger(self.store, self.ports, claim, contract.lease)
        session = self.ports.effectful(event, claim, ledger)
        self.let_send(session, attempt)
        self.heartbeat.keep(claim, contract.lease)
        error: BaseException | None = None
        try:
            try:
                value = await attempt.handler(event, session)
            except Raised as carried:
                ledger.check(carried.raised)
                raise
            ledger.check()
            session.unsettled.check(key.tracking_id)
            await self.reachable(session.apply, self._complete, claim, attempt)
            return Result(DONE, value)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.heartbeat.let_go(claim, contract.lease)
            await self.leave(session, error)

    async def prepare_day(self, key: Key) -> None:
        day = self.store.partition(key)
        if day is not None and day not in self._days:
            await self.ports.outside(self.store.prepare_day, key)
            self._days.add(day)

    def _is_done(self, transaction: DbTransaction, attempt: EventAttempt) -> bool:
        found = self.store.look_up(transaction, attempt.key)
        if found.digest is None and (found.floor_day is None or attempt.key.day >= found.floor_day):
            return False
        self._refuse(transaction, attempt.key, attempt.digest)
        if attempt.departure is not None:
            attempt.departure.remove(transaction)
        return True

    def _complete(self, transaction: DbTransaction, claim: Claim, attempt: EventAttempt) -> None:
        """Fence the attempt: its row and writes commit only if no other worker has claimed the event since."""
        if self.store.finish(transaction, claim.key, claim.token) and self.store.admit(
            transaction, claim.key, attempt.digest
        ):
            if attempt.departure is not None:
                attempt.departure.take_off(transaction, claim.key)
            return
        raise LeaseLostError(
            f"another worker has claimed event {claim.key.tracking_id}; this attempt commits nothing"
        )

    async def reachable(self, ask: Callable[..., Any], *args: Any) -> Any:
        """Make the first call to the database. If it is locked or unavailable, raise `Busy`: no attempt has failed."""
        try:
            return await ask(*args)
        except UNREACHABLE as error:
            busy = self._busy_for(error)
            if busy is None:
                raise
            raise busy from error

    def _busy_for(self, error: Exception) -> Busy | None:
        """What an error of the first call means, if no attempt has failed."""
        if isinstance(error, LockTimeoutError):
            return Busy("the database is locked", delay=AT_ONCE.delay())
        if isinstance(error, PoolTimeout):
            return Busy("all connections of the pool are in use", delay=LATER.delay())
        if isinstance(error, DBAPIError) and self._backend.is_lock_timeout(error):
            return Busy("its row is locked by another transaction", delay=LATER.delay())
        if self.availability.is_to_blame(error):
            return Busy("the database is not available", delay=LATER.delay())
        return None

    async def leave(self, session: Any, error: BaseException | None) -> None:
        """End the session. If the database's file is lost, so is the commit, and no attempt has failed."""
        try:
            await session.leave(error)
        except FileLostError as lost:
            self.availability.is_to_blame(lost)
            raise Busy("the file of the database is lost", delay=LATER.delay()) from lost

    def is_serialization_failure(self, error: BaseException) -> bool:
        raised = error.raised if isinstance(error, Raised) else error
        return any(map(self._backend.is_serialization_failure, with_causes(raised)))
