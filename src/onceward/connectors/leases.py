"""A queue with leases, over any store that keeps rows: all of a connector's behaviour except the keeping.

ready ──fetch──► leased ──DONE──► gone
  ▲                │ ├─RETURNED─► ready, or delayed; the delivery not counted
  │                │ ├─FAILED───► delayed, or a dead letter: `LeaseRules.after_failure`
  └──── delay ─────┘ └─lease runs out─► fetched again, or a dead letter at `max_deliveries`
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Protocol, Self, TypeVar

from onceward.connectors.codec import DecodeError, decode, encode_all
from onceward.connectors.deliveries import Handout, Handouts, Held
from onceward.connectors.lease_rules import (
    BurialReason,
    Bury,
    DeadLetter,
    Exhumed,
    LeaseRules,
    as_text,
    mishap,
    mishaps,
)
from onceward.task.exceptions import ExceptionCategory
from onceward.transaction import Settlement, Transaction, Verdict

_log = logging.getLogger(__name__)

FETCH_WAIT = 1.0
"""Seconds a fetch may wait for its turn at the store: the contract of `fetch_transactions`."""
WRITE_WAIT = 10.0
"""Seconds any other call may wait. An outcome is worth more patience than a fetch that is tried again."""


Row = tuple[int, int | None, int, int, bytes]
"""A message that is available: its key; the token of the delivery whose lease ran out, if one did; its
deliveries so far; the leases that ran out, this one included; its body."""


class Burial(NamedTuple):
    key: int
    token: int | None
    transaction_id: str | None
    reason: BurialReason
    category: ExceptionCategory | None = None
    """None leaves what the store knows of an earlier failure; so does an `error` of None."""
    error: str | None = None
    history: str = ""
    """A line more, if there is one."""


class DeadRow(NamedTuple):
    """A dead letter, as the store keeps it."""

    key: int
    transaction_id: str | None
    body: bytes
    reason: str
    category: str | None
    error: str | None
    deliveries: int
    enqueued_at: float
    died_at: float
    history: str
    """A line of JSON for each failed delivery: `rules.Mishap`."""


class Store(Protocol):
    """Keeps rows. Every method but `transaction` and `close` is called inside a `transaction`.

    Those that return a bool change one row, if its token is still the one given, and say whether it was.
    `remove` and `extend` do so for many, and return those that were not held any more.
    """

    def transaction(self, wait: float) -> AbstractContextManager[object]:
        """One at a time, all or none, durable at its end. Raises `ConnectorClosedError` once closed."""
        ...

    def append(self, bodies: Sequence[bytes], now: float) -> None: ...

    def available(self, now: float, limit: int) -> Sequence[Row]:
        """First those whose lease or delay is over, longest over first; then the ready ones, oldest first."""
        ...

    def lease(self, rows: Sequence[Row], token: int, until: float) -> None:
        """Counts a delivery of each, and keeps its `lost`."""
        ...

    def extend(self, deliveries: Sequence[Held], until: float) -> Sequence[Held]: ...

    def remove(self, deliveries: Sequence[Held]) -> Sequence[Held]: ...

    def give_back(self, key: int, token: int, visible_at: float) -> bool:
        """Takes the delivery back. Makes it ready at its old place with `visible_at` 0, delays it otherwise."""
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
        """`history` is a line more."""
        ...

    def bury(self, burial: Burial, now: float) -> bool: ...

    def counts(self, now: float) -> dict[str, int]: ...

    def dead(self, limit: int) -> Sequence[DeadRow]: ...

    def forget_dead(self, dead: Sequence[tuple[int, float]]) -> None:
        """Each is a key and a `died_at`: a key alone may have been given to a later one since."""
        ...

    def close(self) -> None: ...


class LeasingConnector:
    """The `Connector` contract, over a `Store`."""

    def __init__(self, store: Store, rules: LeaseRules, clock: Callable[[], float]) -> None:
        self.rules = rules
        self.lease = rules.lease
        self._store = store
        self._clock = clock
        self._handouts = Handouts()
        self._suspect_after = rules.suspect_after

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Take at most `batch_size` transactions; a suspect (`LeaseRules.suspect_after`) comes alone."""
        if extra:
            raise TypeError(f"{type(self).__name__} has no fetch option {', '.join(map(repr, extra))}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        with self._store.transaction(FETCH_WAIT):
            now = self._clock()
            rows, transactions, burials = self._choose(batch_size, now)
            token = secrets.randbits(63)
            self._store.lease(rows, token, now + self.lease)
        for burial in burials:
            _log_burial(burial)
        for row, transaction in zip(rows, transactions, strict=True):
            self._handouts.record(transaction, (row[0], token), row[2] + 1)
        return transactions

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Put these at the end of the queue, all or none."""
        bodies = encode_all(transactions)
        with self._store.transaction(WRITE_WAIT):
            self._store.append(bodies, self._clock())

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        """End these deliveries, all or none."""
        with self._store.transaction(WRITE_WAIT):
            ending = self._not_yet_settled(settlements)
            now = self._clock()
            done = [held for held, (settlement, _) in ending.items() if settlement.verdict == Verdict.DONE]
            lost = set(self._store.remove(done))
            if len(done) < len(ending):
                for held, (settlement, handout) in ending.items():
                    if settlement.verdict != Verdict.DONE and not self._end(settlement, handout, now):
                        lost.add(held)
        for _, handout in ending.values():
            handout.settled = True
        for held in lost:
            settlement, _ = ending[held]
            _log.warning(
                "transaction %s: lease lost before its outcome (%s) was known; another delivery has the say",
                settlement.transaction.id,
                settlement.verdict,
            )

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Keep these deliveries for another `lease`, from now. Those already settled need none."""
        with self._store.transaction(WRITE_WAIT):
            handouts = [self._handouts.of(transaction) for transaction in transactions]
            running = {
                handout.held: transaction
                for handout, transaction in zip(handouts, transactions, strict=True)
                if not handout.settled
            }
            lost = self._store.extend(list(running), self._clock() + self.lease)
        for held in lost:
            _log.warning("transaction %s: lease lost, too late to extend it", running[held].id)

    def counts(self) -> dict[str, int]:
        """How many messages are `ready`, `leased`, `delayed` and `dead` now."""
        with self._store.transaction(WRITE_WAIT):
            return self._store.counts(self._clock())

    def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """The dead letters, longest dead first."""
        with self._store.transaction(WRITE_WAIT):
            rows = self._store.dead(limit)
        return [_dead_letter(row) for row in rows]

    def exhume(self, limit: int = 100) -> list[Exhumed]:
        """Dead letters, longest dead first, for a place that keeps all of them. They stay until `forget_dead`."""
        with self._store.transaction(WRITE_WAIT):
            rows = self._store.dead(limit)
        return [_exhumed(row) for row in rows]

    def forget_dead(self, keys: Sequence[Any]) -> None:
        """These are kept elsewhere now."""
        with self._store.transaction(WRITE_WAIT):
            self._store.forget_dead(keys)

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choose(self, batch_size: int, now: float) -> tuple[list[Row], list[Transaction], list[Burial]]:
        """What to hand out. What cannot be handed out is buried on the way, so that it hides nothing."""
        serving: list[Row] = []
        transactions: list[Transaction] = []
        burials: list[Burial] = []
        while not serving and (rows := self._store.available(now, batch_size)):
            doomed: list[Burial] = []
            for row in rows:
                key, token, deliveries, lost, body = row
                suspect = lost >= self._suspect_after
                if suspect and serving:
                    break
                try:
                    transaction = decode(body)
                except DecodeError as error:
                    doomed.append(Burial(key, token, None, BurialReason.UNDECODABLE, None, str(error)))
                    continue
                if deliveries >= self.rules.max_deliveries:
                    doomed.append(Burial(key, token, transaction.id, BurialReason.MAX_DELIVERIES))
                    continue
                serving.append(row)
                transactions.append(transaction)
                if suspect:
                    break
            for burial in doomed:
                self._store.bury(burial, now)
            burials += doomed
        return serving, transactions, burials

    def _not_yet_settled(self, settlements: Sequence[Settlement]) -> dict[Held, tuple[Settlement, Handout]]:
        ending: dict[Held, tuple[Settlement, Handout]] = {}
        for settlement in settlements:
            handout = self._handouts.of(settlement.transaction)
            if not handout.settled:
                ending.setdefault(handout.held, (settlement, handout))
        return ending

    def _end(self, settlement: Settlement, handout: Handout, now: float) -> bool:
        """What becomes of a delivery that is not done. False: it was not held any more."""
        key, token = handout.held
        if settlement.verdict == Verdict.RETURNED:
            return self._store.give_back(key, token, now + settlement.delay if settlement.delay > 0 else 0.0)
        error = settlement.error
        category = None if error is None else error.category
        history = mishap(error, handout.deliveries, now)
        decision = self.rules.after_failure(category, handout.deliveries)
        if isinstance(decision, Bury):
            burial = Burial(
                key, token, settlement.transaction.id, decision.reason, category, as_text(error), history
            )
            return self._store.bury(burial, now)
        return self._store.delay(key, token, now + decision.delay, category, as_text(error), history)


def _log_burial(burial: Burial) -> None:
    if burial.reason is BurialReason.UNDECODABLE:
        _log.error("message %d is now a dead letter: %s", burial.key, burial.error)
    else:
        _log.warning(
            "transaction %s is now a dead letter: it was delivered as often as allowed, and its last "
            "delivery never ended",
            burial.transaction_id,
        )


def _exhumed(row: DeadRow) -> Exhumed:
    return Exhumed(
        key=(row.key, row.died_at),
        body=row.body,
        transaction_id=row.transaction_id,
        reason=BurialReason(row.reason),
        category=None if row.category is None else ExceptionCategory(row.category),
        error=row.error,
        deliveries=row.deliveries,
        enqueued_at=row.enqueued_at,
        died_at=row.died_at,
        history=mishaps(row.history),
    )


def _dead_letter(row: DeadRow) -> DeadLetter:
    try:
        transaction = decode(row.body)
    except DecodeError:
        transaction = None
    return DeadLetter(
        transaction_id=row.transaction_id,
        transaction=transaction,
        reason=BurialReason(row.reason),
        category=None if row.category is None else ExceptionCategory(row.category),
        error=row.error,
        deliveries=row.deliveries,
        enqueued_at=datetime.fromtimestamp(row.enqueued_at, UTC),
        died_at=datetime.fromtimestamp(row.died_at, UTC),
    )


# The `AsyncConnector` contract, over a `LeasingConnector`.


P = ParamSpec("P")
T = TypeVar("T")


class AsyncLeasingConnector:
    """Every method is the one of the sync connector. Subclasses say only how a call is made: `_call`."""

    def __init__(self, wire: LeasingConnector) -> None:
        self._wire = wire
        self.lease = wire.lease

    @property
    def rules(self) -> LeaseRules:
        return self._wire.rules

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it to its end, or not at all, without blocking the event loop for long."""
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

    async def counts_async(self) -> dict[str, int]:
        """As `LeasingConnector.counts`."""
        return await self._call(self._wire.counts)

    async def dead_letters_async(self, limit: int = 100) -> list[DeadLetter]:
        """As `LeasingConnector.dead_letters`."""
        return await self._call(self._wire.dead_letters, limit)

    async def exhume_async(self, limit: int = 100) -> list[Exhumed]:
        """As `LeasingConnector.exhume`."""
        return await self._call(self._wire.exhume, limit)

    async def forget_dead_async(self, keys: Sequence[Any]) -> None:
        """As `LeasingConnector.forget_dead`."""
        await self._call(self._wire.forget_dead, keys)

    async def close_async(self) -> None:
        """As `LeasingConnector.close`."""
        await self._call(self._wire.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()
