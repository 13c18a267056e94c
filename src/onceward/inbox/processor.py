"""What becomes of one event, once for threads and asyncio.

    event ─► contract: type, schema ─► start written down ─► session ─► dedup row
              └─ ContractError          ├─ POISON             └─ Busy     ├─ new ─► handler ─► commit: DONE
                                        └─ Busy                           ├─ there already ─► DUPLICATE
                                                                          ├─ other payload, too old ─► ContractError
                                                                          └─ in hand elsewhere ─► Busy

In `transactional` mode the dedup row is written first and commits with the handler's writes. In `effectful` mode the
claim under a lease keeps others away while nothing is locked, and the dedup row commits with the handler's writes at
the end, if the claim is still ours.

Nothing that must not be acknowledged returns: not now is `Busy` or `Parked`, never is `ContractError`.
"""

from __future__ import annotations

import copy
import logging
from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

import msgspec
from sqlalchemy.exc import DBAPIError

from onceward._sync import Raised
from onceward.db import LockTimeoutError, SessionError
from onceward.db.backends import backend_of
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.inbox import sequencing
from onceward.inbox.attempts import AttemptLedger, Start, poisoned
from onceward.inbox.availability import Availability
from onceward.inbox.contract import Contract
from onceward.inbox.effects import Claim, Heartbeat, Ledger
from onceward.inbox.errors import AT_ONCE, LATER, SOON, Breach, Busy, ContractError, LeaseLostError, Parked
from onceward.inbox.event import Event
from onceward.inbox.metrics import Instruments, Watch, instruments
from onceward.inbox.ports import InboxPorts, Session
from onceward.inbox.sequencing import OutOfTurn
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Key, MissingDay, as_date
from onceward.inbox.upcasting import check_type, upcast
from onceward.storage.ports import SERIALIZATION_PAUSE, SERIALIZATION_RETRIES
from onceward.task.exceptions import AttemptInterrupted
from onceward.task.lifecycle import text_of

_log = logging.getLogger("onceward.inbox")

ENDS = (Exception, CancelledError, AttemptInterrupted)
"""What an attempt ends with. Anything else leaves it without an end, as a crash does."""

Handler = Callable[[Event, Any], Awaitable[Any]]
"""What user code raises comes out of it as `Raised`."""


class Handling(StrEnum):
    """How an event ended that is to be acknowledged."""

    DONE = "done"
    DUPLICATE = "duplicate"
    """It had been done before; the handler was not called."""
    SUPERSEDED = "superseded"
    """A later event of its aggregate had been done before (`latest-wins`); the handler was not called."""


class Result(msgspec.Struct, frozen=True):
    """An event that is to be acknowledged, and how it ended."""

    handling: Handling
    value: Any = None
    """What the handler returned."""

    @property
    def done(self) -> bool:
        """Whether the handler was called."""
        return self.handling is Handling.DONE

    @property
    def duplicate(self) -> bool:
        return self.handling is Handling.DUPLICATE


DONE, DUPLICATE, SUPERSEDED = Handling.DONE, Handling.DUPLICATE, Handling.SUPERSEDED


class EventProcessor:
    def __init__(self, store: Store, ports: InboxPorts) -> None:
        self.store = store
        self.ports = ports
        self.ledger = AttemptLedger(store, ports)
        self._heartbeat = Heartbeat(store, ports)
        self._backend = backend_of(ports.dialect)
        self._days: set[int] = set()
        self.availability = Availability(store, ports)

    async def process(
        self,
        contract: Contract,
        event: Event,
        handler: Handler,
        metrics: Instruments | None,
        start: Start | None = None,
    ) -> Result:
        """One attempt. `start` is the one that was written down with the batch; without it, one is written now."""
        watch = Watch(contract, event, metrics)
        key = Key(contract.consumer_id, event.tracking_id, event.day)
        try:
            if not contract.accepts(event.event_type):
                check_type(contract, event)
            digest = event.digest
            if start is None:
                start = await self.reachable(self.ledger.start, contract, key)
            if not await self.ports.gate.enter(alone=start is None):
                raise Busy("it must run alone, and the others did not end in time", delay=5.0)
            try:
                if start is None:
                    start = await self.reachable(self.ledger.start, contract, key, True)
                current = event
                if contract.model is not None or event.schema_version != contract.schema_version:
                    current = upcast(contract, event)
                if current.lock_token is None:
                    current = with_token(current, start)
                result = await self._attempts(contract, key, digest, current, handler, start)
            finally:
                self.ports.gate.leave()
        except ENDS as error:
            raised = error.raised if isinstance(error, Raised) else error
            watch.failed(raised, start)
            if start is not None:
                await self.ledger.end(key, start.token, text_of(raised))
            raise
        if contract.mode == "effectful" and result.handling is DONE:
            self.ledger.released(key)
        else:
            self.ledger.finished(key)
        self.availability.event_done()
        watch.ended(result.handling, start)
        return result

    async def join(self, contract: Contract, event: Event, handler: Handler, session: Session) -> Result:
        """The same inside a session of the caller's, who commits. Its source has to count the starts."""
        watch = Watch(contract, event, instruments())
        key = Key(contract.consumer_id, event.tracking_id, event.day)
        try:
            check_type(contract, event)
            if event.deliveries is not None and event.deliveries > contract.poison_after:
                raise poisoned(key, event.deliveries - 1)
            await self._prepare(key)
            if contract.mode == "effectful":
                raise ConfigurationError(
                    f"consumer {contract.consumer_id!r} has outside effects (mode='effectful') and cannot run inside a "
                    "session that is open already; call process without a session"
                )
            current = upcast(contract, event)
            result = await self._in_transaction(contract, key, event.digest, current, handler, session)
        except OutOfTurn as early:
            parked = Parked(f"number {early.expected} of its aggregate has not come yet", delay=1.0)
            watch.failed(parked, None)
            raise parked from None
        except MissingDay as missing:
            self._days.discard(key.day)
            raise SessionError(
                f"the partition for events of {as_date(missing.day)} was removed meanwhile; deliver the event again"
            ) from missing
        except Exception as error:
            watch.failed(error.raised if isinstance(error, Raised) else error, None)
            raise
        watch.ended(result.handling, None)
        return result

    async def _attempts(
        self, contract: Contract, key: Key, digest: bytes, event: Event, handler: Handler, start: Start
    ) -> Result:
        """As often as only the neighbours are to blame."""
        once = self._effectful if contract.mode == "effectful" else self._transactional
        made_room = False
        for attempt in range(SERIALIZATION_RETRIES):
            try:
                return await once(contract, key, digest, event, handler, start)
            except OutOfTurn as early:  # its turn among the events of its aggregate has not come yet
                waiting = await self.reachable(
                    self.ports.transact, sequencing.park, self.store, contract, key, event, early.expected
                )
                raise waiting from None
            except MissingDay:
                if made_room:
                    raise ContractError(too_old(key, None), Breach.TOO_OLD, key.tracking_id) from None
                self._days.discard(key.day)
                await self._prepare(key)
                made_room = True
            except (DBAPIError, Raised) as error:
                if not self._only_bad_luck(error):
                    raise
                _log.info("event %s: a serialization failure, trying again", key.tracking_id)
                await self.ports.sleep(SERIALIZATION_PAUSE.delay(attempt))
        raise Busy("the database could not serialise it with others", delay=SOON.delay())

    async def _transactional(
        self, contract: Contract, key: Key, digest: bytes, event: Event, handler: Handler, start: Start
    ) -> Result:
        session = self.ports.session(event)
        await self.reachable(session._enter)
        error: BaseException | None = None
        try:
            return await self._in_transaction(contract, key, digest, event, handler, session)
        except BaseException as raised:
            error = raised
            raise
        finally:
            await session._leave(error)

    async def _in_transaction(
        self, contract: Contract, key: Key, digest: bytes, event: Event, handler: Handler, session: Session
    ) -> Result:
        if not await self.reachable(session._apply, self.store.admit, key, digest):
            await session._apply(self._refuse, key, digest)
            return Result(DUPLICATE)
        if contract.sequencing != "none":
            place = await session._apply(sequencing.take_place, self.store, contract, key, event)
            if place is sequencing.Place.SUPERSEDED:
                return Result(SUPERSEDED)
        return Result(DONE, await handler(event, session))

    def _refuse(self, transaction: DbTransaction, key: Key, digest: bytes) -> None:
        """Returns for a duplicate, and says why in all other cases."""
        found = self.store.look_up(transaction, key)
        if found.digest is not None:
            if found.digest != digest:
                raise ContractError(
                    "it was done before with another payload; an id stands for one payload for ever. It was not done "
                    "again",
                    Breach.CONFLICT,
                    key.tracking_id,
                )
            return
        if found.floor_day is not None and key.day < found.floor_day:
            raise ContractError(too_old(key, found.floor_day), Breach.TOO_OLD, key.tracking_id)
        raise Busy("another copy of it is in hand", delay=AT_ONCE.delay())

    async def _effectful(
        self, contract: Contract, key: Key, digest: bytes, event: Event, handler: Handler, start: Start
    ) -> Result:
        if await self.reachable(self.ports.transact, self._is_done, key, digest):
            return Result(DUPLICATE)
        # Before the first effect: afterwards there must be nothing left that could fail for lack of room.
        await self._prepare(key)
        claim = Claim(key, start.token)
        session = self.ports.effectful(event, claim, Ledger(self.store, self.ports, claim, contract.lease))
        self._heartbeat.keep(claim, contract.lease)
        error: BaseException | None = None
        try:
            await session._enter()
            value = await handler(event, session)
            await self.reachable(session._apply, self._complete, claim, digest)
            return Result(DONE, value)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._heartbeat.let_go(claim, contract.lease)
            await session._leave(error)

    async def _prepare(self, key: Key) -> None:
        if self.store.has_days and key.day not in self._days:
            await self.ports.outside(self.store.prepare_day, key)
            self._days.add(key.day)

    def _is_done(self, transaction: DbTransaction, key: Key, digest: bytes) -> bool:
        found = self.store.look_up(transaction, key)
        if found.digest is None and (found.floor_day is None or key.day >= found.floor_day):
            return False
        self._refuse(transaction, key, digest)
        return True

    def _complete(self, transaction: DbTransaction, claim: Claim, digest: bytes) -> None:
        """The fence: the row and the writes commit only if nobody else has claimed the event since."""
        if self.store.finish(transaction, claim.key, claim.token) and self.store.admit(
            transaction, claim.key, digest
        ):
            return
        raise LeaseLostError(
            f"somebody else has claimed event {claim.key.tracking_id} since; nothing of this attempt is committed"
        )

    async def reachable(self, ask: Callable[..., Any], *args: Any) -> Any:
        """The first thing asked of the database. That it is locked or away is nobody's failed attempt."""
        try:
            return await ask(*args)
        except LockTimeoutError as error:
            raise Busy("the database is locked", delay=AT_ONCE.delay()) from error
        except DBAPIError as error:
            if self._backend.is_lock_timeout(error):
                raise Busy("somebody keeps its row", delay=LATER.delay()) from error
            if self.availability.is_to_blame(error):
                raise Busy("the database is not available", delay=LATER.delay()) from error
            raise

    def _only_bad_luck(self, error: DBAPIError | Raised) -> bool:
        cause: BaseException | None = error.raised if isinstance(error, Raised) else error
        while cause is not None:
            if isinstance(cause, DBAPIError) and self._backend.is_serialization_failure(cause):
                return True
            cause = cause.__cause__
        return False


def with_token(event: Event, start: Start) -> Event:
    """Where the source has no claim with a token, the inbox's own."""
    claimed = copy.copy(event)  # not `replace`, which would check every field once more
    msgspec.structs.force_setattr(claimed, "lock_token", str(start.token))
    return claimed


def too_old(key: Key, floor_day: int | None) -> str:
    floor = "" if floor_day is None else f" ({as_date(floor_day)})"
    return (
        f"it is of {as_date(key.day)}, before the dedup horizon{floor}: whether it was done before is no longer known, "
        "so it is not run"
    )
