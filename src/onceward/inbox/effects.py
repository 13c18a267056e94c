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
from onceward.db.transaction import DbTransaction, regardless
from onceward.inbox.errors import EffectError, EffectInDoubtError, LeaseLostError
from onceward.inbox.ports import InboxPorts
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
"""Takes the key of an effect in doubt; returns `Done(result)` or `NOT_DONE`. If it raises, the doubt remains."""


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

    async def effect(
        self,
        name: str,
        call: Callable[[str], Any],
        reconcile: Reconcile | None,
        cancel: Callable[[], object] | None,
    ) -> Any:
        raise_if_cancelled()
        if not isinstance(name, str) or not name or len(name) > 200:
            raise EffectError(
                f"an effect needs a name of 1 to 200 characters, not {name!r:.80}; it identifies the effect"
            )
        for function in (call, *([] if reconcile is None else [reconcile])):
            # Before anything is recorded: an effect that cannot run is not in doubt.
            check_function(
                function, f"{name_of(function)} of effect {name!r}", asynchronous=self._ports.asynchronous
            )
        written = await self._intend(name)
        if written.state == "done":
            return msgspec.msgpack.decode(written.result or b"")
        if not written.is_new:
            settled = await self._reconcile(name, written.key, reconcile)
            if isinstance(settled, Done):
                await self._settle(name, settled.result)
                return settled.result
        try:
            with nullcontext() if cancel is None else on_cancel(cancel):
                result = await self._ports.call(call, written.key)
        except Exception as error:
            # The effect may have happened: a timeout says nothing about the other side.
            await self._doubt(name, text_of(getattr(error, "raised", error)))
            raise
        await self._settle(name, result)
        return result

    async def _intend(self, name: str) -> Effect:
        claim = self._claim

        def intend(transaction: Any) -> Effect | None:
            if not self._store.renew(transaction, claim.key, claim.token, self._lease):
                return None
            return self._store.intend(transaction, claim.key, name, claim.token, key_of(claim, name))

        written = await self._ports.transact(intend)
        if written is None:
            raise LeaseLostError(
                f"another worker has event {claim.key.tracking_id} now; effect {name!r} was not begun"
            )
        return written

    async def _reconcile(self, name: str, key: str, reconcile: Reconcile | None) -> Any:
        tracking_id = self._claim.key.tracking_id
        if reconcile is None:
            _log.warning(
                "effect %s of event %s is in doubt: the outcome of an earlier attempt is unknown; calling it again "
                "with the same key",
                name,
                tracking_id,
            )
            return NOT_DONE
        answer = await self._ports.call(reconcile, key)
        if answer is not NOT_DONE and not isinstance(answer, Done):
            raise EffectInDoubtError(
                f"whether effect {name!r} of event {tracking_id} has happened is unknown: reconcile returned "
                f"{type(answer).__name__}; it must return Done(result) or NOT_DONE"
            )
        _log.info(
            "effect %s of event %s was in doubt; reconcile returned %s",
            name,
            tracking_id,
            type(answer).__name__,
        )
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

    async def _doubt(self, name: str, error: str) -> None:
        try:
            with regardless():
                await self._ports.transact(self._store.doubt_effect, self._claim.key, name, error)
        except Exception:  # noqa: BLE001  the row says "intended" anyway, and the effect's own error propagates
            _log.warning("could not record why effect %s is in doubt", name, exc_info=True)


def key_of(claim: Claim, name: str) -> str:
    """Return the key of an effect that is first intended under this claim.

    Consumer and effect are part of it: two effects of one event, or one effect of two consumers, are different calls,
    even if they go to the same provider.
    """
    owner = hashlib.blake2b(f"{claim.key.consumer_id}\0{name}".encode(), digest_size=6).hexdigest()
    return f"{claim.key.tracking_id}-{claim.token}-{owner}"
