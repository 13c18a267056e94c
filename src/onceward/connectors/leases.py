"""A queue with leases over any store of rows: all behavior of a connector except storage.

ready ──fetch──► leased ──DONE──► gone
  ▲                │ ├─RETURNED─► ready, or delayed; the delivery not counted
  │                │ ├─FAILED───► delayed, or a dead letter: `LeaseRules.after_failure`
  └──── delay ─────┘ └─lease expires─► fetched again, or a dead letter at `max_deliveries`
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import Any, ParamSpec, Protocol, TypeVar

from onceward._time import wall
from onceward.connectors.base import AsyncClosing, Closing
from onceward.connectors.batches import BlockingCoalescer
from onceward.connectors.codec import DecodeError, decode, encode_all
from onceward.connectors.lease_rules import (
    BurialReason,
    Bury,
    DeadMessage,
    LeaseRules,
    describe_failure,
)
from onceward.connectors.leased_deliveries import Held, LeasedDeliveries, LeasedDelivery, Leasing, decide
from onceward.connectors.lines import KeyOf, LineBehind, Lines
from onceward.connectors.owners import new_token
from onceward.task.exceptions import ExceptionCategory
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

_log = OwnLogger(logging.getLogger("onceward.connectors.leasing"))

P = ParamSpec("P")
T = TypeVar("T")

FETCH_WAIT = 1.0
"""Seconds a fetch may wait for its turn at the store: the contract of `fetch_transactions`."""
WRITE_WAIT = 10.0
"""Seconds any other call may wait: longer than a fetch, which is simply tried again."""

_NEVER_ENDED = (
    "transaction %s is now a dead letter: it reached max_deliveries, and its last delivery was never settled"
)

AvailableRow = tuple[int, int | None, int, int, bytes]
"""An available message: its key; the token of its last delivery, if that one's lease expired; its deliveries
so far; its expired leases, including this one; its body."""


class LeaseStore(Protocol):
    """Stores rows. Every method except `transaction` and `close` is called inside a `transaction`.

    Methods that return a bool change one row if it still has the given token, and return whether it did.
    `remove` and `extend` do so for many rows, and return those that were no longer held.
    """

    def transaction(self, wait: float) -> AbstractContextManager[object]:
        """Run one at a time in each thread, all or none, durable at its end. Raises `ConnectorClosedError` once
        closed."""
        ...

    def now(self) -> float:
        """Seconds by which leases and delays are measured: the same for all that share the store, and set by nobody. 0
        if the store has a server, which adds its own clock."""
        ...

    def append(self, bodies: Sequence[bytes], now: float) -> None: ...

    def available(self, now: float, limit: int) -> Sequence[AvailableRow]:
        """Return rows whose lease or delay is over, longest over first, then the ready ones, oldest first."""
        ...

    def lease(self, rows: Sequence[AvailableRow], token: int, until: float) -> None:
        """Count a delivery of each row, and store its number of expired leases."""
        ...

    def extend(self, deliveries: Sequence[Held], until: float) -> Sequence[Held]: ...

    def remove(self, deliveries: Sequence[Held], transactions: Sequence[Transaction]) -> Sequence[Held]:
        """A durable store also records which transactions these were, for `onceward balance`."""
        ...

    def give_back(self, key: int, token: int, visible_at: float) -> bool:
        """Uncount the delivery. With `visible_at` 0 the message is ready at its old place, otherwise delayed."""
        ...

    def delay(
        self,
        key: int,
        token: int,
        until: float,
        category: ExceptionCategory | None,
        error: str | None,
        history: str,
    ) -> bool:
        """Delay a failed message, and append the line `history`."""
        ...

    def bury(
        self,
        key: int,
        token: int | None,
        now: float,
        reason: BurialReason,
        transaction_id: str | None,
        category: ExceptionCategory | None = None,
        error: str | None = None,
        history: str = "",
    ) -> bool:
        """Make it a dead letter, and append the line `history`. None for `category` or `error` keeps the value of an
        earlier failure."""
        ...

    def counts(self, now: float) -> dict[str, int]: ...

    def hasten(self, key: int) -> None:
        """Make a message ready that waits for its time."""
        ...

    def dead(self, limit: int) -> list[DeadMessage]:
        """Return dead letters, longest dead first. The `key` of each is never that of another."""
        ...

    def forget_dead(self, keys: Sequence[Any]) -> None: ...

    def acknowledge_dead(self, keys: Sequence[Any]) -> None: ...

    def close(self) -> None: ...


class DueStore(LeaseStore, Protocol):
    """A store whose connector waits for messages itself."""

    def due(self) -> float | None:
        """When the next message is available: 0 if one is ready, the end of a lease or delay, None if there is none."""
        ...


def seconds_until_due(store: DueStore, now: Callable[[], float]) -> float:
    """How long until a message is available, if none arrives: 0 if one is, `inf` if there is none."""
    with store.transaction(FETCH_WAIT):
        due = store.due()
        return inf if due is None else max(due - now(), 0.0)


class LeasingConnector(Leasing, Closing):
    """The `Connector` contract, over a `LeaseStore`."""

    def __init__(
        self, store: LeaseStore, rules: LeaseRules, clock: Callable[[], float] | None = None
    ) -> None:
        """With a `clock`, it measures leases and delays, too, instead of the store."""
        self.rules = rules
        self.lease = rules.lease
        self.owner: str | None = None
        self._store = store
        self._clock = clock or wall
        """Seconds since 1970, for people to read."""
        self._now = clock or store.now
        self._deliveries = LeasedDeliveries()
        self._out = BlockingCoalescer[bytes](self._append, blocks=True)
        self._append_alone = getattr(store, "append_alone", None)
        self._suspect_after = rules.suspect_after
        self._fetch_wait = FETCH_WAIT
        self._lines: Lines | None = None

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Take at most `batch_size` transactions; a suspect (`LeaseRules.suspect_after`) is delivered alone."""
        if extra:
            raise TypeError(f"{type(self).__name__} has no fetch option {', '.join(map(repr, extra))}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        rows: list[AvailableRow] = []
        while not rows:
            with self._store.transaction(self._fetch_wait):
                now = self._now()
                rows, transactions, buried = self._choose(batch_size, now)
                token = self._new_token()
                self._store.lease(rows, token, now + self.lease)
            if self._lines is None or not self._lines.has_more:
                break
        for level, message, *args in buried:
            _log.log(level, message, *args)
        for row, transaction in zip(rows, transactions, strict=True):
            self._deliveries.record(transaction, (row[0], token), row[2] + 1, lost=row[3])
        return transactions

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Put these at the end of the queue, all or none. Those of several threads share a transaction."""
        self.dispatch_bodies(encode_all(transactions))

    def dispatch_bodies(self, bodies: Sequence[bytes]) -> None:
        """`dispatch_transactions`, once they are encoded."""
        if bodies:
            self._out.send(bodies)
        else:
            self._append(bodies)  # it creates the queue, if nothing else

    def _append(self, bodies: Sequence[bytes]) -> None:
        alone = self._append_alone
        if bodies and alone is not None and alone(bodies, self._clock(), WRITE_WAIT):
            return
        with self._store.transaction(WRITE_WAIT):
            self._store.append(bodies, self._clock())

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        """End these deliveries, all or none."""
        ending: dict[Held, tuple[Settlement, LeasedDelivery]] = {}
        done: dict[Held, Transaction] = {}
        for settlement in settlements:
            delivery = self._deliveries.of(settlement.transaction)
            if not delivery.settled and delivery.held not in ending:
                ending[delivery.held] = settlement, delivery
                if settlement.verdict == Verdict.DONE:
                    done[delivery.held] = settlement.transaction
        if not ending:
            return  # they left the queue in the transactions of their handlers
        with self._store.transaction(WRITE_WAIT):
            now = self._now()
            lost = set(self._store.remove(list(done), list(done.values()))) if done else set()
            if len(done) < len(ending):
                for held, (settlement, delivery) in ending.items():
                    if settlement.verdict != Verdict.DONE and not self._end(settlement, delivery, now):
                        lost.add(held)
        for _, delivery in ending.values():
            delivery.settled = True
        for held in lost:
            settlement, _ = ending[held]
            _log.warning(
                "transaction %s: lease expired before outcome `%s` was recorded; a newer delivery owns the message",
                settlement.transaction.id,
                settlement.verdict,
            )
        for held, (settlement, delivery) in ending.items():
            if settlement.verdict == Verdict.FAILED and held not in lost:
                _log.info("transaction %s: %s", settlement.transaction.id, delivery.next)

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Keep these deliveries for another `lease` from now, except those already settled."""
        with self._store.transaction(WRITE_WAIT):
            running = {
                delivery.held: (delivery, transaction)
                for delivery, transaction in zip(
                    map(self._deliveries.of, transactions), transactions, strict=True
                )
                if not delivery.settled
            }
            lost = self._store.extend(list(running), self._now() + self.lease)
        for held in lost:
            delivery, transaction = running[held]
            if not delivery.settled and not delivery.leaving:  # otherwise its outcome was recorded meanwhile
                _log.warning("transaction %s: lease expired, too late to extend it", transaction.id)

    def hasten_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Make those of these available now that were given back for later."""
        settled = [each for each in map(self._deliveries.get, map(id, transactions)) if each and each.settled]
        with self._store.transaction(WRITE_WAIT):
            for delivery in settled:
                self._store.hasten(delivery.held[0])

    def holds(self, delivered: Transaction, /) -> bool:
        """Whether this connector has delivered it, and it is not settled."""
        delivery = self._deliveries.get(id(delivered))
        return delivery is not None and not delivery.settled

    def settled(self, delivered: Transaction, /) -> None:
        """Take note that it has left the queue in the transaction of its handler."""
        self._deliveries.of(delivered).settled = True

    def counts(self) -> dict[str, int]:
        """Count the messages that are `ready`, `leased`, `delayed` and `dead` now."""
        with self._store.transaction(WRITE_WAIT):
            return self._store.counts(self._now())

    def dead_letters(self, limit: int = 100) -> list[DeadMessage]:
        """Return dead letters, longest dead first. They stay until `forget_dead`."""
        with self._store.transaction(WRITE_WAIT):
            return self._store.dead(limit)

    def forget_dead(self, keys: Sequence[Any]) -> None:
        """Remove dead letters by their `key`, once another store has them."""
        with self._store.transaction(WRITE_WAIT):
            self._store.forget_dead(keys)

    def acknowledge_dead(self, keys: Sequence[Any]) -> None:
        """Remove dead letters by their `key`, because another copy of each is done. They count as done, too."""
        with self._store.transaction(WRITE_WAIT):
            self._store.acknowledge_dead(keys)

    def leave_poison_to_inbox(self) -> None:
        """See `InboxLeaseRules`. An inbox calls this."""
        self.rules = self.rules.beside_inbox()

    def keep_order(self, key_of: KeyOf, *, hold_dead: bool) -> None:
        """From now on, deliver only the first message of each key: see `onceward.connectors.lines`."""
        self._lines = Lines(self._store, key_of, hold_dead=hold_dead)

    @property
    def in_lines(self) -> bool:
        """Whether it keeps order: then an outcome that is settled makes the next message of its key available."""
        return self._lines is not None

    def lines_behind(self, keys: Sequence[str], limit: int) -> dict[str, LineBehind]:
        """What waits behind the first messages of these keys, with at most `limit` of their ids."""
        if self._lines is None:
            return {}
        with self._store.transaction(WRITE_WAIT):
            return self._lines.behind(keys, limit)

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._store.close()

    def _new_token(self) -> int:
        return secrets.randbits(63) if self.owner is None else new_token(self.owner)

    def _choose(
        self, batch_size: int, now: float
    ) -> tuple[list[AvailableRow], list[Transaction], list[tuple[Any, ...]]]:
        """Return the rows to deliver, their transactions, and log lines to write after the transaction. Messages that
        cannot be delivered are buried on the way, so they do not block the ones behind them."""
        serving: list[AvailableRow] = []
        transactions: list[Transaction] = []
        buried: list[tuple[Any, ...]] = []
        available = self._store.available if self._lines is None else self._lines.form
        read = decode if self._lines is None else self._lines.decode
        while not serving and (rows := available(now, batch_size)):
            doomed: list[tuple[Any, ...]] = []
            for row in rows:
                key, token, deliveries, lost, body = row
                suspect = lost >= self._suspect_after
                if suspect and serving:
                    break
                try:
                    transaction = read(body)
                except DecodeError as error:
                    doomed.append(
                        (key, token, self._clock(), BurialReason.UNDECODABLE, None, None, str(error))
                    )
                    buried.append((logging.ERROR, "message %d is now a dead letter: %s", key, error))
                    continue
                if self.rules.is_exhausted(deliveries, lost):
                    doomed.append((key, token, self._clock(), BurialReason.MAX_DELIVERIES, transaction.id))
                    buried.append((logging.WARNING, _NEVER_ENDED, transaction.id))
                    continue
                serving.append(row)
                transactions.append(transaction)
                if suspect:
                    break
            for burial in doomed:
                self._store.bury(*burial)
        return serving, transactions, buried

    def _end(self, settlement: Settlement, delivery: LeasedDelivery, now: float) -> bool:
        """End a delivery that is not done. Return False if its lease was lost."""
        key, token = delivery.held
        if settlement.verdict == Verdict.RETURNED:
            return self._store.give_back(key, token, now + settlement.delay if settlement.delay > 0 else 0.0)
        died_at = self._clock()
        failure = describe_failure(settlement.error, delivery.deliveries, died_at)
        decision = decide(self.rules, settlement, delivery)
        if isinstance(decision, Bury):
            return self._store.bury(key, token, died_at, decision.reason, settlement.transaction.id, *failure)
        return self._store.delay(key, token, now + decision.delay, *failure)


class AsyncLeasingConnector(AsyncClosing):
    """The `AsyncConnector` contract over a `LeasingConnector`. Subclasses define how it is called: `_call`."""

    def __init__(self, wire: LeasingConnector) -> None:
        self._wire = wire
        self.lease = wire.lease

    @property
    def rules(self) -> LeaseRules:
        return self._wire.rules

    def leave_poison_to_inbox(self) -> None:
        """As `LeasingConnector.leave_poison_to_inbox`."""
        self._wire.leave_poison_to_inbox()

    def keep_order(self, key_of: KeyOf, *, hold_dead: bool) -> None:
        """As `LeasingConnector.keep_order`."""
        self._wire.keep_order(key_of, hold_dead=hold_dead)

    @property
    def in_lines(self) -> bool:
        """As `LeasingConnector.in_lines`."""
        return self._wire.in_lines

    async def lines_behind_async(self, keys: Sequence[str], limit: int) -> dict[str, LineBehind]:
        """As `LeasingConnector.lines_behind`."""
        return await self._call(self._wire.lines_behind, keys, limit)

    def holds(self, delivered: Transaction, /) -> bool:
        """As `LeasingConnector.holds`."""
        return self._wire.holds(delivered)

    def settled(self, delivered: Transaction, /) -> None:
        """As `LeasingConnector.settled`."""
        self._wire.settled(delivered)

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it, completely or not at all, without blocking the event loop for long."""
        raise NotImplementedError

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """As `LeasingConnector.fetch_transactions`."""
        return await self._call(self._wire.fetch_transactions, batch_size, **extra)

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `LeasingConnector.dispatch_transactions`."""
        await self._call(self._wire.dispatch_transactions, transactions)

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        """As `LeasingConnector.settle_transactions`."""
        await self._call(self._wire.settle_transactions, settlements)

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `LeasingConnector.extend_transactions`."""
        await self._call(self._wire.extend_transactions, transactions)

    async def hasten_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        """As `LeasingConnector.hasten_transactions`."""
        await self._call(self._wire.hasten_transactions, transactions)

    def is_suspect(self, transaction: Transaction, /) -> bool:
        """See `onceward.connectors.base`."""
        return self._wire.is_suspect(transaction)

    def extend_from_thread(self, transactions: Sequence[Transaction], /) -> None:
        """See `AsyncConnector.extend_from_thread`."""
        self._wire.extend_transactions(self._wire.fetched_here(transactions))

    async def counts_async(self) -> dict[str, int]:
        """As `LeasingConnector.counts`."""
        return await self._call(self._wire.counts)

    async def dead_letters_async(self, limit: int = 100) -> list[DeadMessage]:
        """As `LeasingConnector.dead_letters`."""
        return await self._call(self._wire.dead_letters, limit)

    async def forget_dead_async(self, keys: Sequence[Any]) -> None:
        """As `LeasingConnector.forget_dead`."""
        await self._call(self._wire.forget_dead, keys)

    async def acknowledge_dead_async(self, keys: Sequence[Any]) -> None:
        """As `LeasingConnector.acknowledge_dead`."""
        await self._call(self._wire.acknowledge_dead, keys)

    async def close_async(self) -> None:
        """As `LeasingConnector.close`."""
        await self._call(self._wire.close)
