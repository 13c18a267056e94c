"""A boundary under the engine: facts concurrently, and a cursor that passes only what is done without a hole.

    confirmed │ done  done  in hand  done  in hand │ not fetched yet
              └── the cursor moves to the end of the second "done", no further

What fails comes again after a while and holds the cursor back meanwhile, as the boundary's rules have it. With
`dead_letters` a fact that fails for good is buried there first, and then the cursor passes it. State is in memory only:
after a crash the boundary hands out again what was not confirmed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from onceward.boundary.client import AsyncBoundaryClient, BoundaryClient, envelope_for
from onceward.boundary.model import LARGEST_PAGE, Envelope, Fact, Page, StoredFact
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.burials import burial_of
from onceward.connectors.codec import PayloadError
from onceward.connectors.rules import Bury, LeaseRules, OnFailure
from onceward.deadletters import AsyncDeadLetters, Burial, DeadLetters
from onceward.settlement import Settlement, Verdict
from onceward.task.exceptions import ConfigurationError
from onceward.transaction import Transaction

_log = logging.getLogger(__name__)

MOST_IN_HAND = LARGEST_PAGE
"""Facts beyond the cursor: the boundary hands out pages from the cursor on, and no larger ones."""


class _Held:
    __slots__ = ("deliveries", "done", "due", "fact", "in_hand", "transaction")

    def __init__(self, fact: StoredFact) -> None:
        self.fact = fact
        self.transaction = transaction_of(fact)
        self.deliveries = 0
        self.in_hand = False
        self.done = False
        self.due = 0.0


class Window:
    """The facts beyond the cursor, in the order of their offsets."""

    def __init__(self, rules: LeaseRules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._by_identity: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, page: Page) -> None:
        for fact in page.facts:
            if fact.offset not in self._held:
                held = self._held[fact.offset] = _Held(fact)
                self._by_identity[id(held.transaction)] = held

    def take(self, size: int) -> list[Transaction]:
        moment = self._clock()
        taken: list[Transaction] = []
        for held in self._held.values():
            if len(taken) == size:
                break
            if not held.in_hand and not held.done and held.due <= moment:
                held.in_hand = True
                held.deliveries += 1
                taken.append(held.transaction)
        return taken

    def free(self) -> int:
        """How many could be taken now."""
        moment = self._clock()
        return sum(not held.in_hand and not held.done and held.due <= moment for held in self._held.values())

    def failed(self, settlement: Settlement) -> _Held | None:
        """The fact, if it has failed for good and is to be buried."""
        held = self._find(settlement.transaction)
        if held is None or settlement.verdict is not Verdict.FAILED or not held.in_hand:
            return None
        category = None if settlement.error is None else settlement.error.category
        return held if isinstance(self._rules.after_failure(category, held.deliveries), Bury) else None

    def settle(self, settlement: Settlement, *, buries: bool) -> None:
        held = self._find(settlement.transaction)
        if held is None or not held.in_hand:
            return
        held.in_hand = False
        if settlement.verdict is Verdict.DONE:
            held.done = True
        elif settlement.verdict is Verdict.RETURNED:
            held.deliveries -= 1
            held.due = self._clock() + settlement.delay
        else:
            category = None if settlement.error is None else settlement.error.category
            decision = self._rules.after_failure(category, held.deliveries)
            if isinstance(decision, Bury) and buries:
                held.done = True
            else:
                delay = self._rules.redelivery_delay if isinstance(decision, Bury) else decision.delay
                held.due = self._clock() + delay

    def finished(self) -> int | None:
        """The offset up to which everything is done; None if that is nothing new."""
        last = None
        for offset, held in self._held.items():
            if not held.done:
                break
            last = offset
        return last

    def confirmed(self, offset: int) -> None:
        for passed in [each for each in self._held if each <= offset]:
            del self._by_identity[id(self._held.pop(passed).transaction)]

    def _find(self, transaction: Transaction) -> _Held | None:
        held = self._by_identity.get(id(transaction))
        if held is None:
            _log.warning("transaction %s is not in hand here any more", transaction.id)
        return held


class _Boundary:
    def __init__(
        self,
        client: Any,
        consumer_name: str | None,
        zones: tuple[str | None, str | None],
        rules: LeaseRules,
        dead_letters: Any,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._consumer = consumer_name
        self._zones = zones
        self._letters = dead_letters
        self._window = Window(rules, clock)
        self._turn = threading.Lock()
        self._closed = False
        self.rules = rules
        self.lease = float("inf")
        """Nothing is taken away from who has it: a cursor has no leases."""

    def _name(self) -> str:
        if self._closed:
            raise ConnectorClosedError("this boundary connector is closed; make a new one to go on")
        if self._consumer is None:
            raise ConfigurationError("to fetch facts the connector needs a consumer_name, which is durable")
        return self._consumer

    def _burials(self, settlements: Sequence[Settlement]) -> list[Burial]:
        if self._letters is None:
            return []
        return [
            burial_of(
                settlement.transaction,
                consumer=self._name(),
                error=settlement.error or "it failed",
                origin=f"boundary, offset {held.fact.offset}",
                attempts=held.deliveries,
            )
            for settlement in settlements
            if (held := self._window.failed(settlement)) is not None
        ]

    def _facts(self, transactions: Sequence[Transaction]) -> list[tuple[Envelope, Fact]]:
        from_zone, to_zone = self._zones
        if from_zone is None or to_zone is None:
            raise ConfigurationError("to append facts the connector needs from_zone and to_zone")
        return [fact_of(transaction, from_zone, to_zone) for transaction in transactions]


class BoundaryConnector(_Boundary):
    """A `Connector` to a boundary, for threads: `BoundaryConnector(BoundaryClient(url), "plant-a-receiver")`.

    Transactions have the fact's message_id as id and `{"subject", "predicate", "object"}` as payload; one that is
    dispatched needs the same. `on_failure` and `max_deliveries` say when a fact has failed for good, which matters only
    with `dead_letters`: without, it is tried again for ever, and holds the cursor.
    """

    def __init__(
        self,
        client: BoundaryClient,
        consumer_name: str | None = None,
        *,
        from_zone: str | None = None,
        to_zone: str | None = None,
        dead_letters: DeadLetters | None = None,
        max_deliveries: int = 5,
        redelivery_delay: float = 1.0,
        on_failure: OnFailure = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rules = LeaseRules(
            max_deliveries=max_deliveries, redelivery_delay=redelivery_delay, on_failure=on_failure
        )
        super().__init__(client, consumer_name, (from_zone, to_zone), rules, dead_letters, clock)

    def fetch_transactions(self, batch_size: int, /) -> list[Transaction]:
        name = self._name()
        with self._turn:
            if self._window.free() < batch_size and len(self._window) < MOST_IN_HAND:
                wanted = min(len(self._window) + batch_size, MOST_IN_HAND)
                self._window.add(self._client.fetch(name, wanted))
            return self._window.take(batch_size)

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Append each. Not all or none: what was appended before an error is appended, and repeating all is safe."""
        for envelope, fact in self._facts(transactions):
            self._client.append(envelope, fact)

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        name = self._name()
        with self._turn:
            burials = self._burials(settlements)
            if burials:
                self._letters.bury(*burials)
            for settlement in settlements:
                self._window.settle(settlement, buries=self._letters is not None)
            offset = self._window.finished()
            if offset is not None:
                self._client.confirm(name, offset)
                self._window.confirmed(offset)

    def close(self) -> None:
        self._closed = True


class AsyncBoundaryConnector(_Boundary):
    """`BoundaryConnector` for asyncio."""

    def __init__(
        self,
        client: AsyncBoundaryClient,
        consumer_name: str | None = None,
        *,
        from_zone: str | None = None,
        to_zone: str | None = None,
        dead_letters: AsyncDeadLetters | None = None,
        max_deliveries: int = 5,
        redelivery_delay: float = 1.0,
        on_failure: OnFailure = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rules = LeaseRules(
            max_deliveries=max_deliveries, redelivery_delay=redelivery_delay, on_failure=on_failure
        )
        super().__init__(client, consumer_name, (from_zone, to_zone), rules, dead_letters, clock)

    async def fetch_transactions_async(self, batch_size: int, /) -> list[Transaction]:
        name = self._name()
        if self._window.free() < batch_size and len(self._window) < MOST_IN_HAND:
            wanted = min(len(self._window) + batch_size, MOST_IN_HAND)
            self._window.add(await self._client.fetch(name, wanted))
        return self._window.take(batch_size)

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        for envelope, fact in self._facts(transactions):
            await self._client.append(envelope, fact)

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        name = self._name()
        burials = self._burials(settlements)
        if burials:
            await self._letters.bury(*burials)
        for settlement in settlements:
            self._window.settle(settlement, buries=self._letters is not None)
        offset = self._window.finished()
        if offset is not None:
            await self._client.confirm(name, offset)
            self._window.confirmed(offset)

    async def close_async(self) -> None:
        self._closed = True


def transaction_of(stored: StoredFact) -> Transaction:
    """A fact, as the engine and the inbox see it."""
    envelope, fact = stored.envelope, stored.fact
    metadata: dict[str, Any] = {
        "tracking_id": envelope.message_id,
        "event_type": fact.predicate,
        "aggregate_id": fact.subject,
        "offset": stored.offset,
        "from_zone": envelope.from_zone,
        "to_zone": envelope.to_zone,
    }
    traceparent = envelope.labels.get("traceparent")
    if traceparent:
        metadata["traceparent"] = traceparent
    return Transaction(
        id=envelope.message_id,
        payload={"subject": fact.subject, "predicate": fact.predicate, "object": fact.object},
        metadata=metadata,
        created_at=datetime.fromtimestamp(envelope.produced_at_unix_ms / 1000, UTC),
        source=envelope.from_zone,
        correlation_id=envelope.correlation_id or None,
        parent_id=envelope.causation_id or None,
    )


def fact_of(transaction: Transaction, from_zone: str, to_zone: str) -> tuple[Envelope, Fact]:
    """A transaction whose payload is a fact."""
    payload = transaction.payload
    if not isinstance(payload, dict) or not {"subject", "predicate", "object"} <= payload.keys():
        raise PayloadError(
            f"transaction {transaction.id} is no fact: its payload needs subject, predicate and object"
        )
    labels = {key: transaction.metadata[key] for key in ("traceparent",) if key in transaction.metadata}
    envelope = envelope_for(
        transaction.id,
        from_zone=from_zone,
        to_zone=to_zone,
        produced_at_unix_ms=int(transaction.created_at.timestamp() * 1000),
        correlation_id=transaction.correlation_id or "",
        causation_id=transaction.parent_id or "",
        labels=labels,
    )
    return envelope, Fact(
        subject=payload["subject"],
        predicate=payload["predicate"],
        object_json=msgspec.json.encode(payload["object"]).decode(),
    )
