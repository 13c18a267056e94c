"""Events in hand: the token of each claim, and the heartbeat that keeps those with a lease."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from onceward.inbox.stores.base import Store
from onceward.inbox.stores.rows import Key

if TYPE_CHECKING:
    from onceward.db.transaction import DbTransaction
    from onceward.inbox.ports import InboxPorts

_log = logging.getLogger("onceward.inbox")

BEATS_PER_LEASE = 4
"""More than three: one beat may be lost, and the next still comes in time."""


class Claim:
    """One start of one event. `token` is the number of the start: no other claim of the event has it."""

    __slots__ = ("key", "lost", "token")

    def __init__(self, key: Key, token: int) -> None:
        self.key = key
        self.token = token
        self.lost = False
        """Somebody else has the event now."""


class Heartbeat:
    """Keeps the leases of all claims in hand: those of one length together, every quarter of it."""

    def __init__(self, store: Store, ports: InboxPorts) -> None:
        self._store = store
        self._ports = ports
        self._held: dict[float, set[Claim]] = {}
        """By the length of their lease. As long as an entry is there, its heart beats."""
        self._lock = threading.Lock()

    def keep(self, claim: Claim, lease: float) -> None:
        with self._lock:
            beats = lease in self._held
            self._held.setdefault(lease, set()).add(claim)
        if not beats:
            self._ports.spawn(self._beat(lease))

    def let_go(self, claim: Claim, lease: float) -> None:
        with self._lock:
            self._held.get(lease, set()).discard(claim)

    async def _beat(self, lease: float) -> None:
        try:
            while True:
                await self._ports.sleep(lease / BEATS_PER_LEASE)
                with self._lock:
                    held = [claim for claim in self._held[lease] if not claim.lost]
                    if not held:
                        del self._held[lease]
                        return
                await self._renew(held, lease)
        except BaseException:  # its event loop ends
            with self._lock:
                self._held.pop(lease, None)
            raise

    async def _renew(self, held: list[Claim], lease: float) -> None:
        def renew(transaction: DbTransaction) -> list[Claim]:
            return [
                claim for claim in held if not self._store.renew(transaction, claim.key, claim.token, lease)
            ]

        try:
            lost = await self._ports.transact(renew)
        except Exception:  # noqa: BLE001  the next beat may still be in time
            _log.warning("the leases of %d events could not be renewed", len(held), exc_info=True)
            return
        for claim in lost:
            if claim in self._held.get(lease, ()):
                claim.lost = True
                _log.warning(
                    "event %s: its lease was lost, and somebody else may have it; what this attempt still does "
                    "will not be committed",
                    claim.key.tracking_id,
                )
