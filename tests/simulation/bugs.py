"""Bugs that the simulation must find. Each replaces a piece of the real code by one with a classic mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from onceward.boundary.consumer.loop import FactLoop
from onceward.boundary.links.link import ZoneLink
from onceward.connectors.jetstream.ledger import DeliveryLedger
from onceward.connectors.jetstream.queue import JetStreamQueue
from onceward.connectors.leases import LeasingConnector
from onceward.connectors.redis_streams import scripts
from onceward.connectors.redis_streams.protocol import StreamQueue
from onceward.connectors.sqlite import statements
from onceward.inbox.effects import Claim, Ledger
from onceward.inbox.middleware import ContractKeeper
from onceward.inbox.processor import EventProcessor
from onceward.inbox.stores.sqlite import SqliteStore
from onceward.outbox import statements as outbox
from onceward.outbox.claims import Ending, OutboxRows
from onceward.outbox.relay import Relay
from onceward.transaction import Settlement, Verdict
from tests.simulation.consumers import ConsumerWorld
from tests.simulation.facts import FactWorld
from tests.simulation.links import LinkWorld
from tests.simulation.relays import RelayWorld
from tests.simulation.remote import JetStreamWorld, PostgreSqlWorld, RedisWorld, ThreadWorld
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

        def with_day(
            self: Any, transaction: Any, key: Any, *more: Any, method: Any = method, **named: Any
        ) -> Any:
            self.run(transaction, other_days, tracking=key.tracking_id, day=key.day)
            return method(self, transaction, key, *more, **named)

        by_day[name] = with_day
    admit = EventProcessor.admit

    async def admit_by_day(self: Any, attempt: Any, session: Any, **named: Any) -> Any:
        values = {"tracking": attempt.key.tracking_id, "day": attempt.key.day}
        await session.apply(lambda transaction: self.store.run(transaction, other_days, **values))
        return await admit(self, attempt, session, **named)

    with patch.multiple(SqliteStore, **by_day), patch.object(EventProcessor, "admit", admit_by_day):
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

    def complete(self: Any, transaction: Any, claim: Claim, attempt: Any) -> None:
        self.store.forget_attempts(transaction, claim.key.consumer_id, [claim.key.tracking_id])
        self.store.admit(transaction, claim.key, attempt.digest)

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
            await self._confirm(page.facts[-1].offset)
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


@contextmanager
def lease_of_stream_not_extended() -> Iterator[None]:
    def extend(self: Any, transactions: Any) -> Iterator[Any]:
        yield from ()

    with patch.object(StreamQueue, "extend", extend):
        yield


@contextmanager
def fence_of_stream_ignored() -> Iterator[None]:
    """A delivery that was overtaken gives back, delays or ends its message all the same."""
    with patch.object(scripts, "SETTLE", _changed(scripts.SETTLE, "held[id] ~= deliveries", "1 == 2")):
        yield


@contextmanager
def lease_of_stream_ignored() -> Iterator[None]:
    """Entries are claimed from consumers that have just got them."""
    claim = _changed(scripts.CLAIM, "local idle, first = least_idle(name, lease)", "local idle, first = 0")
    with patch.object(scripts, "CLAIM", _changed(claim, "left_of(each, lease) == 0 and ", "")):
        yield


@contextmanager
def delay_of_stream_ignored() -> Iterator[None]:
    """What is delayed is free like an entry of a consumer."""
    with patch.object(
        scripts, "CLAIM", _changed(scripts.CLAIM, "name == 'delayed' and AGES or lease", "lease")
    ):
        yield


@contextmanager
def ack_wait_not_extended() -> Iterator[None]:
    async def extend(self: Any, transactions: Any) -> None:
        return

    with patch.object(JetStreamQueue, "extend", extend):
        yield


@contextmanager
def fence_of_jetstream_ignored() -> Iterator[None]:
    """A delivery that was overtaken does not notice, and records its outcome."""
    read = DeliveryLedger.read

    async def read_without_number(self: Any, seq: int) -> Any:
        state, revision = await read(self, seq)
        return msgspec.structs.replace(state, number=0), revision

    with patch.object(DeliveryLedger, "read", read_without_number):
        yield


@contextmanager
def fence_of_relay_ignored() -> Iterator[None]:
    """A relay records the outcome of messages that another has claimed since."""
    names = ("PUBLISH", "GIVE_BACK", "FAIL", "BURY")
    fence = "token = :token"
    unfenced = {name: _changed(getattr(outbox, name), fence, "(1 OR token = :token)") for name in names}
    with patch.multiple(outbox, **unfenced):
        yield


@contextmanager
def late_commits_skipped() -> Iterator[None]:
    """A relay remembers how far it has come."""
    so_far = "seq > (SELECT coalesce(max(seq), 0) FROM onceward_outbox WHERE state = 'published')"
    skipping = _changed(outbox.CANDIDATES, "state = 'ready'", f"state = 'ready' AND {so_far}")
    with patch.object(outbox, "CANDIDATES", skipping):
        yield


@contextmanager
def order_of_keys_ignored() -> Iterator[None]:
    with patch.object(OutboxRows, "_blocked", lambda *_: {}):
        yield


@contextmanager
def recorded_before_sent() -> Iterator[None]:
    """A relay records messages as published, and sends them afterwards."""

    def publish(self: Any, transaction: Any) -> None:
        claim = self._claims[transaction.id]
        self._record(transaction.id, claim, Ending(published=list(claim.rows)))
        self._send(claim)

    with patch.object(Relay, "publish", publish):
        yield


@contextmanager
def claims_not_extended() -> Iterator[None]:
    with patch.object(OutboxRows, "extend", lambda *_: []):
        yield


def _changed(source: str, old: str, new: str) -> str:
    assert old in source
    return source.replace(old, new)


PLANTED: dict[str, tuple[Callable[[], Any], type[Simulation]]] = {
    "ack before commit": (ack_before_commit, ConsumerWorld),
    "lease not extended": (lease_not_extended, ConsumerWorld),
    "fence ignored": (fence_ignored, ConsumerWorld),
    "dedup by day": (dedup_by_day, ConsumerWorld),
    "commit before effect": (commit_before_effect, ConsumerWorld),
    "claim not checked": (claim_not_checked, ConsumerWorld),
    "confirm before apply": (confirm_before_apply, FactWorld),
    "confirm before append": (confirm_before_append, LinkWorld),
    "postgresql: ack before commit": (ack_before_commit, PostgreSqlWorld),
    "postgresql: lease not extended": (lease_not_extended, PostgreSqlWorld),
    "redis: ack before commit": (ack_before_commit, RedisWorld),
    "redis: commit before effect": (commit_before_effect, RedisWorld),
    "redis: lease not extended": (lease_of_stream_not_extended, RedisWorld),
    "redis: lease ignored": (lease_of_stream_ignored, RedisWorld),
    "redis: delay ignored": (delay_of_stream_ignored, RedisWorld),
    "redis: fence ignored": (fence_of_stream_ignored, RedisWorld),
    "jetstream: ack before commit": (ack_before_commit, JetStreamWorld),
    "jetstream: fence ignored": (fence_of_jetstream_ignored, JetStreamWorld),
    "jetstream: lease not extended": (ack_wait_not_extended, JetStreamWorld),
    "threads: claim not checked": (claim_not_checked, ThreadWorld),
    "threads: commit before effect": (commit_before_effect, ThreadWorld),
    "relay: fence ignored": (fence_of_relay_ignored, RelayWorld),
    "relay: late commits skipped": (late_commits_skipped, RelayWorld),
    "relay: order ignored": (order_of_keys_ignored, RelayWorld),
    "relay: recorded before sent": (recorded_before_sent, RelayWorld),
    "relay: lease not extended": (claims_not_extended, RelayWorld),
}
