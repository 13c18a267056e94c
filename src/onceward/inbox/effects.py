"""Effects outside the database: recorded before the call, settled after it, in doubt in between.

An outside call cannot be part of the transaction. Instead, its key stays the same over every retry and every new claim
of the event, so a provider that honors idempotency keys acts once; and a crash in between leaves a record.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import msgspec

from onceward._functions import check_function, name_of
from onceward._process.forks import forks
from onceward.db.transaction import DbTransaction, regardless
from onceward.durations import Duration, seconds_of
from onceward.inbox.errors import (
    Breach,
    ContractError,
    EffectError,
    EffectInDoubtError,
    EffectRefused,
    LeaseLostError,
)
from onceward.inbox.ports import InboxPorts
from onceward.inbox.sessions.rules import calling
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.types import Effect, Key
from onceward.task.cancellation import on_cancel, raise_if_cancelled
from onceward.task.lifecycle import text_of
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.inbox"))

BEATS_PER_LEASE = 4
"""More than three, so one beat may fail and the next still comes in time."""


class NotDoneType:
    """See `NOT_DONE`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NOT_DONE"


NOT_DONE: Final = NotDoneType()
"""Returned by a `reconcile` hook if the effect has not happened; it is then called again with the same key."""


class Done(msgspec.Struct, frozen=True):
    """Returned by a `reconcile` hook if the effect has happened, with the result that the call would have returned."""

    result: Any = None


Reconcile = Callable[[str], Any]
"""Takes the key of an effect in doubt; returns `Done(result)` or `NOT_DONE`, or raises `EffectRefused`. If it raises
anything else, the doubt remains."""


class Claim:
    """One start of one event. `token` is the number of the start, unique among the claims of the event."""

    __slots__ = ("key", "lost", "token")

    def __init__(self, key: Key, token: int) -> None:
        self.key = key
        self.token = token
        self.lost = False
        """Whether another worker has the event now."""


class Heartbeat:
    """Renews the leases of all claims in flight: those of one length together, every quarter of it."""

    def __init__(self, store: Store, ports: InboxPorts) -> None:
        self._store = store
        self._ports = ports
        self.held: dict[float, set[Claim]] = {}
        """Claims by the length of their lease. As long as an entry exists, a task renews its leases."""
        self._lock = threading.Lock()

    def keep(self, claim: Claim, lease: float) -> None:
        with self._lock:
            beats = lease in self.held
            self.held.setdefault(lease, set()).add(claim)
        if not beats:
            self._ports.spawn(self._beat(lease))

    def let_go(self, claim: Claim, lease: float) -> None:
        with self._lock:
            self.held.get(lease, set()).discard(claim)

    async def _beat(self, lease: float) -> None:
        try:
            while True:
                await self._ports.sleep(lease / BEATS_PER_LEASE)
                with self._lock:
                    held = [claim for claim in self.held[lease] if not claim.lost]
                    if not held:
                        del self.held[lease]
                        return
                await self._renew(held, lease)
        except BaseException:  # the event loop is closing
            with self._lock:
                self.held.pop(lease, None)
            raise

    async def _renew(self, held: list[Claim], lease: float) -> None:
        def renew(transaction: DbTransaction) -> list[Claim]:
            return [
                claim for claim in held if not self._store.renew(transaction, claim.key, claim.token, lease)
            ]

        try:
            lost = await self._ports.transact(renew)
        except Exception:  # noqa: BLE001  the next beat may still be in time
            _log.warning("could not renew the leases of %d events", len(held), exc_info=True)
            return
        for claim in lost:
            if claim in self.held.get(lease, ()):
                claim.lost = True
                _log.warning(
                    "event %s: lease lost, another worker may have the event; this attempt will commit nothing",
                    claim.key.tracking_id,
                )


class Ledger:
    """The effects of one attempt at one event."""

    def __init__(self, store: Store, ports: InboxPorts, claim: Claim, lease: float) -> None:
        self._store = store
        self._ports = ports
        self._claim = claim
        self._lease = lease
        self.check_call: Callable[[], None] = lambda: None
        """Raises if the call has done what only the handler may do."""
        self._used: dict[str, object] = {}
        self._refused: ContractError | None = None
        self._generation = forks.generation

    async def effect(
        self,
        name: str,
        call: Callable[[str], Any],
        reconcile: Reconcile | None,
        cancel: Callable[[], object] | None,
        key_valid_for: Duration | None,
    ) -> Any:
        raise_if_cancelled()
        if self._generation != forks.generation:
            raise EffectError(
                f"effect {name!r} was not called: this process is a fork of the one that has the event"
            )
        if not isinstance(name, str) or not name or len(name) > 200:
            raise EffectError(
                f"an effect needs a name of 1 to 200 characters, not {name!r:.80}; it identifies the effect"
            )
        for what, function in (("call", call), ("reconcile", reconcile or call)):
            if not callable(function):
                raise EffectError(
                    f"the {what} of effect {name!r} is {type(function).__name__}, not a function, and nothing was "
                    f"recorded; write session.effect({name!r}, lambda key: client.charge(…, key)): the inbox calls it, "
                    "with the key"
                )
            # Before anything is recorded: an effect that cannot run is not in doubt.
            check_function(
                function, f"{name_of(function)} of effect {name!r}", asynchronous=self._ports.asynchronous
            )
        valid_for = None if key_valid_for is None else seconds_of(key_valid_for, "key_valid_for")
        self._use(name)
        written = await self._intend(name, valid_for)
        if written.state == "done":
            return msgspec.msgpack.decode(written.result or b"")
        try:
            if not written.is_new:
                settled = await self._reconcile(name, written, reconcile)
                if isinstance(settled, Done):
                    await self._settle(name, settled.result)
                    return settled.result
            result = await self._call(name, call, cancel, written.key)
        except EffectInDoubtError as error:
            self._refused = self._refused or error
            raise
        except Exception as error:
            await self._note_refusal(name, written.key, getattr(error, "raised", error))
            raise
        await self._settle(name, result)
        return result

    def check(self, failure: BaseException | None = None) -> None:
        """Raise if an effect was not called, because its name was used twice or it is in doubt, even if the handler
        caught the error: what it writes would say that the effect did or did not happen."""
        if self._refused is not None and failure is not self._refused:
            raise self._refused from failure

    def _use(self, name: str) -> None:
        """Take the name, once: tasks and threads of one handler may use effects at the same time."""
        this = object()
        if self._used.setdefault(name, this) is this:
            return
        self._refused = repeated(name, self._claim.key.tracking_id)
        raise self._refused

    async def _call(
        self, name: str, call: Callable[[str], Any], cancel: Callable[[], object] | None, key: str
    ) -> Any:
        try:
            with nullcontext() if cancel is None else on_cancel(cancel):
                return await self._run(call, key)
        except Exception as error:
            raised = getattr(error, "raised", error)
            if not isinstance(raised, EffectRefused):
                # The effect may have happened: a timeout says nothing about the other side.
                await self._note("why it is in doubt", self._store.doubt_effect, name, text_of(raised))
            raise

    async def _run(self, function: Callable[[str], Any], key: str) -> Any:
        """Run user code that speaks to the outside world."""
        before = calling.set((*calling.get(), self._claim))
        try:
            result = await self._ports.call(function, key)
            self.check_call()
            return result
        finally:
            calling.reset(before)

    async def _intend(self, name: str, valid_for: float | None) -> Effect:
        token, key = self._claim.token, key_of(self._claim, name)
        written: Effect = await self._while_ours(name, self._store.intend, token, key, valid_for)
        return written

    async def _while_ours(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        """Run an operation on the effect in one transaction with the check that the event is still ours."""
        claim = self._claim

        def run(transaction: DbTransaction) -> tuple[bool, Any]:
            if not self._store.renew(transaction, claim.key, claim.token, self._lease):
                return False, None
            return True, operation(transaction, claim.key, name, *args)

        ours, result = await self._ports.transact(run)
        if not ours:
            raise LeaseLostError(
                f"another worker has event {claim.key.tracking_id} now; effect {name!r} was not begun"
            )
        return result

    async def _reconcile(self, name: str, written: Effect, reconcile: Reconcile | None) -> Any:
        tracking_id = self._claim.key.tracking_id
        if reconcile is None:
            if written.expired:
                raise EffectInDoubtError(in_doubt(name, tracking_id, written), tracking_id)
            _log.warning(
                "effect %s of event %s is in doubt: the outcome of an earlier attempt is unknown; calling it again "
                "with the same key",
                name,
                tracking_id,
            )
            return NOT_DONE
        answer = await self._run(reconcile, written.key)
        if answer is not NOT_DONE and not isinstance(answer, Done):
            raise EffectInDoubtError(
                f"whether effect {name!r} of event {tracking_id} has happened is unknown: reconcile returned "
                f"{type(answer).__name__}; it must return Done(result) or NOT_DONE",
                tracking_id,
            )
        _log.info(
            "effect %s of event %s was in doubt; reconcile says that it %s",
            name,
            tracking_id,
            "did not happen" if answer is NOT_DONE else "happened",
        )
        if answer is NOT_DONE and written.expired:
            await self._while_ours(name, self._store.restart_key)
        return answer

    async def _settle(self, name: str, result: Any) -> None:
        try:
            encoded = msgspec.msgpack.encode(result)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise EffectError(
                f"effect {name!r} has happened, but its result cannot be stored for a retry ({error}); "
                "return plain data, such as the provider's id"
            ) from error
        with regardless():  # it has happened
            await self._ports.transact(self._store.settle_effect, self._claim.key, name, encoded)

    async def _note_refusal(self, name: str, key: str, error: BaseException) -> None:
        if isinstance(error, EffectRefused):
            await self._note("that it was refused", self._store.refuse_effect, name, key, text_of(error))

    async def _note(self, what: str, operation: Callable[..., Any], name: str, *args: Any) -> None:
        try:
            with regardless():
                await self._ports.transact(operation, self._claim.key, name, *args)
        except Exception:  # noqa: BLE001  the row says "intended" anyway, and the effect's own error propagates
            _log.warning("effect %s: could not record %s", name, what, exc_info=True)


def repeated(name: str, tracking_id: str) -> ContractError:
    """Say why the second call under a name is not made."""
    return ContractError(
        f"the handler used the effect name {name!r} twice in one attempt at event {tracking_id}, and a name stands "
        "for one call: the second call was not made. Name each, such as "
        'f"ship-{item.id}"; to repeat a call that failed, do it inside the call or let the attempt fail',
        Breach.REPEATED_EFFECT,
        tracking_id,
    )


def in_doubt(name: str, tracking_id: str, effect: Effect) -> str:
    """Say why an effect whose key has expired is not called again."""
    return (
        f"whether effect {name!r} of event {tracking_id} has happened is unknown, and its key {effect.key} is "
        f"{effect.age:.0f} s old: the provider remembers it for {effect.valid_for:.0f} s, so another call could be a "
        "second effect. Pass a reconcile hook, or ask the provider and record the answer with "
        "`onceward inbox resolve`; then redrive the event"
    )


def key_of(claim: Claim, name: str) -> str:
    """Return the key of an effect that is first intended under this claim.

    Consumer and effect are part of it: two effects of one event, or one effect of two consumers, are different calls,
    even if they go to the same provider.
    """
    owner = hashlib.blake2b(f"{claim.key.consumer_id}\0{name}".encode(), digest_size=6).hexdigest()
    return f"{claim.key.tracking_id}-{claim.token}-{owner}"
