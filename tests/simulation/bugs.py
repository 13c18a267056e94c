"""Bugs that the simulation must find. Each replaces a piece of the real code by one with a classic mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from onceward.boundary.consumer.loop import FactLoop
from onceward.boundary.links.link import ZoneLink
from onceward.connectors.leases import LeasingConnector
from onceward.connectors.sqlite import statements
from onceward.inbox.effects import Claim, Ledger
from onceward.inbox.middleware import ContractKeeper
from onceward.inbox.processor import EventProcessor
from onceward.inbox.stores.sqlite import SqliteStore
from onceward.transaction import Settlement, Verdict
from tests.simulation.consumers import ConsumerWorld
from tests.simulation.facts import FactWorld
from tests.simulation.links import LinkWorld
from tests.simulation.simulation import Simulation


@contextmanager
def ack_before_commit() -> Iterator[None]:
    """A message is acknowledged as soon as it is fetched."""
    wrap = ContractKeeper.wrap_source

    def wrap_source(self: Any, source: Any) -> Any:
        wrapped = wrap(self, source)

        async def fetch(size: int, **extra: Any) -> Sequence[Any]:
            batch = await wrapped.fetch(size, **extra)
            await source.settle([Settlement(each, Verdict.DONE) for each in batch])
            return batch

        return wrapped.replace(fetch=fetch)

    with patch.object(ContractKeeper, "wrap_source", wrap_source):
        yield


@contextmanager
def lease_not_extended() -> Iterator[None]:
    with patch.object(LeasingConnector, "extend_transactions", lambda self, transactions: None):
        yield


@contextmanager
def fence_ignored() -> Iterator[None]:
    """Any worker that had a message once may end it."""
    remove = "DELETE FROM messages WHERE seq = ? AND (1 OR ?)"
    with patch.object(statements, "REMOVE", remove):
        yield


@contextmanager
def dedup_by_day() -> Iterator[None]:
    """A copy that was produced on another day counts as another event."""
    other_days = "DELETE FROM onceward_dedup WHERE tracking_id = :tracking AND own_day <> :day"
    by_day = {}
    for name in ("admit", "look_up"):
        method = getattr(SqliteStore, name)

        def with_day(self: Any, transaction: Any, key: Any, *more: Any, method: Any = method) -> Any:
            self.run(transaction, other_days, tracking=key.tracking_id, day=key.day)
            return method(self, transaction, key, *more)

        by_day[name] = with_day
    with patch.multiple(SqliteStore, **by_day):
        yield


@contextmanager
def commit_before_effect() -> Iterator[None]:
    """An effect is recorded as done, and called afterwards."""

    async def call(self: Any, name: str, function: Any, cancel: Any, key: str) -> Any:
        await self._settle(name, None)
        return await self._ports.call(function, key)

    with patch.object(Ledger, "_call", call):
        yield


@contextmanager
def claim_not_checked() -> Iterator[None]:
    """An attempt commits though another worker has claimed the event since."""

    def complete(self: Any, transaction: Any, claim: Claim, digest: bytes) -> None:
        self.store.forget_attempts(transaction, claim.key.consumer_id, [claim.key.tracking_id])
        self.store.admit(transaction, claim.key, digest)

    with (
        patch.object(EventProcessor, "_complete", complete),
        patch.object(SqliteStore, "renew", lambda *_: True),
    ):
        yield


@contextmanager
def confirm_before_apply() -> Iterator[None]:
    """A batch of facts is confirmed before it is applied."""

    async def run(self: Any, attempt: Any, drain: bool) -> Any:
        while not self._is_stopped():
            page = await self._fetch()
            if not page.facts:
                await self._wait()
                continue
            await self._confirm_batch(page)
            for fact in page.facts:
                error = await attempt(fact)
                if error is not None:
                    return error
        return None

    with patch.object(FactLoop, "_run", run):
        yield


@contextmanager
def confirm_before_append() -> Iterator[None]:
    """A link confirms a page before it is in the log of its zone."""
    take = ZoneLink._take

    async def confirm_and_take(self: Any, source: Any, facts: Sequence[Any]) -> Any:
        await source.confirm(self.consumer, facts[-1].offset)
        return await take(self, source, facts)

    with patch.object(ZoneLink, "_take", confirm_and_take):
        yield


PLANTED: dict[str, tuple[Callable[[], Any], type[Simulation]]] = {
    "ack before commit": (ack_before_commit, ConsumerWorld),
    "lease not extended": (lease_not_extended, ConsumerWorld),
    "fence ignored": (fence_ignored, ConsumerWorld),
    "dedup by day": (dedup_by_day, ConsumerWorld),
    "commit before effect": (commit_before_effect, ConsumerWorld),
    "claim not checked": (claim_not_checked, ConsumerWorld),
    "confirm before apply": (confirm_before_apply, FactWorld),
    "confirm before append": (confirm_before_append, LinkWorld),
}
