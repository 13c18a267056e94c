"""A source whose dead letters are kept in a `DeadLetters` store, and come back from there when they are redriven.

    source ──fetch──► engine          buried by the source ──► moved to the store, then forgotten by the source
    store ───fetch──► engine          redriven letters whose time has come, under a lease of the store

A letter is in the source's own keeping until the store has it for certain; moving it twice is burying it once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import msgspec

from onceward._sync import run_blocking
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.codec import DecodeError, decode, sanitise_metadata
from onceward.connectors.deliveries import Handouts
from onceward.deadletters.burial import burial_of_exhumed
from onceward.deadletters.dead_letters import DeadLetters
from onceward.deadletters.dead_letters_asyncio import AsyncDeadLetters
from onceward.deadletters.letter import Category, category_of
from onceward.deadletters.operations import Ending
from onceward.deadletters.redrive_leases import Handout
from onceward.errors import ConfigurationError
from onceward.task.exceptions import TransactionException
from onceward.transaction import Settlement, Transaction, Verdict

# From the bytes of a dead letter back to a transaction, such that an inbox knows it for the event it was.


ENVELOPE = ("event_type", "aggregate_id", "sequence", "schema_version", "traceparent", "tracestate")
"""What goes before a payload, and into metadata."""


def transaction_of(
    body: bytes, *, message_id: str, event_at: float | None, first_failed_at: float
) -> Transaction:
    """What was buried: a transaction, or JSON as it came from a queue. Raises `DecodeError` for anything else.

    Id, payload and time are those by which `Event.of` knew the message: redriven, it is a duplicate if it was done.
    """
    try:
        return decode(body)
    except DecodeError as error:
        refusal = error
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise refusal from None
    head, payload = _envelope(content)
    # Where nothing tells the event's own time, one that never changes: by it the inbox finds its record again.
    created_at = datetime.fromtimestamp(first_failed_at if event_at is None else event_at, UTC)
    return Transaction(id=message_id, payload=payload, metadata=head, created_at=created_at)


def _envelope(content: Any) -> tuple[dict[str, Any], Any]:
    if not isinstance(content, Mapping) or content.get("tracking_id") is None or "payload" not in content:
        return {}, content
    head = {name: content[name] for name in ENVELOPE if content.get(name) is not None}
    return sanitise_metadata(head), content["payload"]


_log = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two looks for redriven letters while the source has work: it is not to pay for them."""
MOVED_AT_ONCE = 10
"""They may be large."""


class _WithDeadLetters:
    """Written for both modes: `_ask` and `_letters` are coroutines that block in one of them."""

    def __init__(self, source: Any, dead_letters: Any, consumer: str, origin: str | None) -> None:
        if not consumer:
            raise ConfigurationError(
                "dead letters are kept by consumer: give its name, the contract's consumer_id"
            )
        source = _Nothing() if source is None else source
        suffix = "_async" if isinstance(self, AsyncWithDeadLetters) else ""
        missing = [name for name in ("exhume", "forget_dead") if not hasattr(source, name + suffix)]
        if missing:
            raise ConfigurationError(
                f"{type(source).__name__} has no {missing[0]}{suffix}: a source whose dead letters can be moved has "
                "exhume and forget_dead, as the connectors here have"
            )
        self._inner = source
        self._letters = dead_letters._core
        self._consumer = consumer
        self._origin = origin or type(source).__name__
        self.lease: float = getattr(source, "lease", 60.0)
        self._handouts = Handouts()
        self._looked_at = float("-inf")
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)  # `counts` and what else a connector has

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def _fetch(self, size: int, **extra: Any) -> Sequence[Transaction]:
        looks = not self._closed and time.monotonic() - self._looked_at >= LOOK_EVERY
        if looks:
            redriven = await self._redriven(size)
            if redriven:
                return redriven
            self._looked_at = time.monotonic()
        batch: Sequence[Transaction] = await self._ask("fetch_transactions", size, **extra)
        if looks or not batch:  # a fetch may bury: what was lost too often, what cannot be decoded
            await self._move()
        if not batch and not looks and not self._closed:
            # There is time to look, and a run may be about to end.
            return await self._redriven(size)
        return batch

    async def _redriven(self, size: int) -> list[Transaction]:
        try:
            handouts = await self._letters.hand_out(self._consumer, size, self.lease)
        except Exception as error:  # noqa: BLE001
            _log.error("redriven letters have to wait, the source goes on without them: %s", error)
            return []
        transactions, unreadable = [], []
        for handout in handouts:
            try:
                transaction = transaction_of(
                    handout.body,
                    message_id=handout.message_id,
                    event_at=handout.event_at,
                    first_failed_at=handout.first_failed_at,
                )
            except DecodeError as error:
                unreadable.append(Ending(handout, "failed", str(Category.CONTRACT), str(error)))
                continue
            self._handouts.record(transaction, (handout, handout.token), handout.lost + 1)
            transactions.append(transaction)
        if unreadable:
            try:
                await self._letters.settle(self._consumer, unreadable)
            except Exception as error:  # noqa: BLE001  it comes again when its lease has run out
                _log.error("%d redriven letters cannot be read: %s", len(unreadable), error)
        return transactions

    def _ours(self, transaction: Transaction) -> Any:
        """How it was handed out; None for what is the source's own."""
        if not len(self._handouts):
            return None
        try:
            return self._handouts.of(transaction)
        except ValueError:
            return None

    async def _settle(self, settlements: Sequence[Settlement]) -> None:
        ours, rest = [], []
        for settlement in settlements:
            handout = self._ours(settlement.transaction)
            if handout is None:
                rest.append(settlement)
            elif not handout.settled:
                ours.append((handout, _ending(handout.held[0], settlement)))
        if ours:
            if self._closed:
                raise ConnectorClosedError("this connector is closed; make a new one to go on")
            for lost in await self._letters.settle(self._consumer, [ending for _, ending in ours]):
                _log.warning("dead letter %d: lease lost before its outcome was known", lost.id)
            for handout, _ in ours:  # whatever becomes of the rest, and however often that is tried
                handout.settled = True
        if rest:
            await self._ask("settle_transactions", rest)
            if any(settlement.verdict is Verdict.FAILED for settlement in rest):
                await self._move()

    async def _extend(self, transactions: Sequence[Transaction]) -> None:
        ours, rest = [], []
        for transaction in transactions:
            handout = self._ours(transaction)
            if handout is None:
                rest.append(transaction)
            elif not handout.settled:
                ours.append(handout.held[0])
        if ours:
            for lost in await self._letters.extend(ours, self.lease):
                _log.warning("dead letter %d: lease lost, too late to extend it", lost.id)
        if rest:
            await self._ask("extend_transactions", rest)

    async def _move(self) -> None:
        """Bury in the store what the source has buried. Where that fails now, it is done later: nothing is lost."""
        moved: set[str] = set()
        try:
            while exhumed := await self._ask("exhume", MOVED_AT_ONCE):
                keys = {repr(each.key) for each in exhumed}
                if keys <= moved:
                    raise RuntimeError(f"{type(self._inner).__name__}.forget_dead has not forgotten them")
                burials = [
                    burial_of_exhumed(each, consumer=self._consumer, origin=self._origin) for each in exhumed
                ]
                await self._letters.bury(burials)
                await self._ask("forget_dead", [each.key for each in exhumed])
                moved |= keys
        except Exception as error:  # noqa: BLE001
            _log.error("dead letters stay with their source for now, they could not be moved: %s", error)


class _Nothing:
    """No source: only what is redriven."""

    def fetch_transactions(self, _: int, /) -> Sequence[Transaction]:
        return ()

    async def fetch_transactions_async(self, _: int, /) -> Sequence[Transaction]:
        return ()

    def exhume(self, _: int) -> Sequence[Any]:
        return ()

    async def exhume_async(self, _: int) -> Sequence[Any]:
        return ()

    def forget_dead(self, _: Sequence[Any]) -> None: ...

    async def forget_dead_async(self, _: Sequence[Any]) -> None: ...

    def close(self) -> None: ...

    async def close_async(self) -> None: ...


class WithDeadLetters(_WithDeadLetters):
    """A `Connector` around a `Connector`: `WithDeadLetters(source, DeadLetters(engine), consumer="billing")`.

    `consumer` is the contract's consumer_id, or any name by which the letters shall be found; `origin` says in words
    where they came from. With None for a source it hands out redriven letters only, for those who bury in a loop of
    their own. A redriven letter that fails once is dead again: the retries of its task have been spent by then.
    """

    def __init__(
        self, source: Any, dead_letters: DeadLetters, *, consumer: str, origin: str | None = None
    ) -> None:
        if not isinstance(dead_letters, DeadLetters):
            raise ConfigurationError(
                f"WithDeadLetters needs DeadLetters, not {type(dead_letters).__name__}; AsyncDeadLetters go with "
                "AsyncWithDeadLetters"
            )
        super().__init__(source, dead_letters, consumer, origin)

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, method)(*args, **kwargs)

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """Redriven letters whose time has come, or else what the source has."""
        return run_blocking(self._fetch(batch_size, **extra))

    def dispatch_transactions(self, transactions: Sequence[Transaction], /) -> None:
        self._inner.dispatch_transactions(transactions)

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        """To whom each belongs. What the source buries goes to the store."""
        run_blocking(self._settle(settlements))

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        run_blocking(self._extend(transactions))

    def close(self) -> None:
        self._closed = True
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncWithDeadLetters(_WithDeadLetters):
    """`WithDeadLetters` for asyncio."""

    def __init__(
        self, source: Any, dead_letters: AsyncDeadLetters, *, consumer: str, origin: str | None = None
    ) -> None:
        if not isinstance(dead_letters, AsyncDeadLetters):
            raise ConfigurationError(
                f"AsyncWithDeadLetters needs AsyncDeadLetters, not {type(dead_letters).__name__}"
            )
        super().__init__(source, dead_letters, consumer, origin)

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._inner, f"{method}_async")(*args, **kwargs)

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        return await self._fetch(batch_size, **extra)

    async def dispatch_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        await self._inner.dispatch_transactions_async(transactions)

    async def settle_transactions_async(self, settlements: Sequence[Settlement], /) -> None:
        await self._settle(settlements)

    async def extend_transactions_async(self, transactions: Sequence[Transaction], /) -> None:
        await self._extend(transactions)

    async def close_async(self) -> None:
        self._closed = True
        await self._inner.close_async()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()


def _ending(handout: Handout, settlement: Settlement) -> Ending:
    error: TransactionException | None = settlement.error
    kind = getattr(error, "kind", None)
    category = category_of(None if error is None else error.category, None if kind is None else str(kind))
    return Ending(
        handout,
        str(settlement.verdict),
        str(category),
        "" if error is None else str(error),
        settlement.delay,
    )
