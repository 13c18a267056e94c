"""A source whose dead letters move to a `DeadLetters` store, and come back from there when they are redriven.

    source ──fetch──► engine          buried by the source ──► moved to the store, then forgotten by the source
    store ───fetch──► engine          redriven letters that are due, under a lease of the store

A letter stays in the source until the store has it; moving it twice buries it once.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.lease_rules import DeadMessage
from onceward.connectors.leased_deliveries import LeasedDeliveries
from onceward.connectors.lines import KeyOf
from onceward.deadletters.burial import Burial, burial_of_dead
from onceward.deadletters.operations import DeadLetterOperations
from onceward.errors import ConfigurationError
from onceward.middleware import SourceCalls
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

_log = OwnLogger(logging.getLogger("onceward.connectors.dead_letters"))

CHECK_EVERY = 1.0
"""Seconds between checks for redriven letters while the source has work, so they do not slow it down."""
MOVED_AT_ONCE = 10
"""Letters moved in one transaction: they may be large."""
LETTER_METHODS = ("dead_letters", "forget_dead")
"""Methods of a source whose dead letters can be moved."""
ACKNOWLEDGE = "acknowledge_dead"
"""Method of a source that counts, for dead letters of which another copy is done."""


class SourcePort(ABC):
    """How a source is called, in threads and in asyncio."""

    gives_letters = True
    suffix: ClassVar[str]
    """Suffix of the source's method names."""

    def __init__(self, source: Any) -> None:
        self.source = NoSource() if source is None else source
        self.acknowledges_letters = any(
            hasattr(self.source, ACKNOWLEDGE + suffix) for suffix in ("", "_async")
        )

    def check(self) -> None:
        """Raise `ConfigurationError` if dead letters cannot be moved away from the source."""
        names = [name + self.suffix for name in LETTER_METHODS]
        missing = [name for name in names if not hasattr(self.source, name)]
        if missing:
            raise ConfigurationError(
                f"{type(self.source).__name__} has no {missing[0]}; to move its dead letters, a source needs "
                f"{' and '.join(names)}, like onceward's own connectors"
            )

    @abstractmethod
    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any: ...


class BlockingSourcePort(SourcePort):
    suffix = ""

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.source, method)(*args, **kwargs)


class AsyncSourcePort(SourcePort):
    suffix = "_async"

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.source, method + self.suffix)(*args, **kwargs)


class WrappedSourcePort(SourcePort):
    """A source as middleware receives it."""

    def __init__(self, calls: SourceCalls) -> None:
        super().__init__(calls.connector)
        self._calls = {
            "fetch_transactions": calls.fetch,
            "settle_transactions": calls.settle,
            "extend_transactions": calls.extend,
        }
        self._ask = calls.ask
        self.gives_letters = all(
            hasattr(self.source, name) or hasattr(self.source, f"{name}_async") for name in LETTER_METHODS
        )

    def check(self) -> None:
        """Accept any source: one that keeps its dead letters still receives redriven ones."""

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.get(method)
        return await (self._ask(method, *args) if call is None else call(*args, **kwargs))


class LetterSource:
    """The logic for both modes. `_ask` and `_letters` wait; in threads they block."""

    def __init__(
        self,
        port: SourcePort,
        letters: DeadLetterOperations,
        consumer: str,
        origin: str | None,
        key_of: KeyOf | None = None,
    ) -> None:
        if not consumer:
            raise ConfigurationError(
                "dead letters are stored by consumer: give its name, the contract's consumer_id"
            )
        port.check()
        source = port.source
        if hasattr(source, "bury_failures"):
            source.bury_failures()
        self._inner = source
        self._ask = port.ask
        self._moves = port.gives_letters
        self._acknowledges = port.acknowledges_letters
        self._letters = letters
        self._consumer = consumer
        self._origin = origin or type(source).__name__
        self._key_of = key_of
        self.lease: float = getattr(source, "lease", 60.0)
        self._redriven = LeasedDeliveries()
        self._checked_at = float("-inf")
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)  # `counts`, and whatever else a connector has

    async def fetch(self, size: int, **extra: Any) -> Sequence[Transaction]:
        checks = not self._closed and time.monotonic() - self._checked_at >= CHECK_EVERY
        if checks:
            redriven = await self._fetch_redriven(size)
            if redriven:
                return redriven
            self._checked_at = time.monotonic()
        batch: Sequence[Transaction] = await self._ask("fetch_transactions", size, **extra)
        if self._moves and (checks or not batch):  # a fetch may bury messages: lost too often, or undecodable
            await self._move()
        if not batch and not checks and not self._closed:
            # There is time to check, and the run may be about to end.
            return await self._fetch_redriven(size)
        return batch

    async def _fetch_redriven(self, size: int) -> list[Transaction]:
        try:
            delivered = await self._letters.deliver(self._consumer, size, self.lease)
        except Exception as error:  # noqa: BLE001
            _log.error("cannot read redriven letters; continuing with the source without them: %s", error)
            return []
        for held, number, transaction in delivered:
            self._redriven.record(transaction, held, number)
        return [transaction for _, _, transaction in delivered]

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        ours, rest = [], []
        failed = False
        for settlement in settlements:
            delivery = self._redriven.get(id(settlement.transaction))
            if delivery is None:
                rest.append(settlement)
                failed |= settlement.verdict is Verdict.FAILED
            elif not delivery.settled:
                ours.append((delivery, settlement))
        if ours:
            if self._closed:
                raise ConnectorClosedError("this connector is closed; create a new one to continue")
            endings = [(delivery.held, settlement) for delivery, settlement in ours]
            for letter_id, _ in await self._letters.settle(self._consumer, endings):
                _log.warning("dead letter %d: lease expired before its outcome was recorded", letter_id)
            for delivery, _ in ours:  # even if settling the rest fails and is retried
                delivery.settled = True
        if rest:
            await self._ask("settle_transactions", rest)
            if failed and self._moves:
                await self._move()

    async def extend(self, transactions: Sequence[Transaction]) -> None:
        ours, rest = [], []
        for transaction in transactions:
            delivery = self._redriven.get(id(transaction))
            if delivery is None:
                rest.append(transaction)
            elif not delivery.settled:
                ours.append(delivery.held)
        if ours:
            for letter_id, _ in await self._letters.extend(ours, self.lease):
                _log.warning("dead letter %d: lease expired, too late to extend it", letter_id)
        if rest:
            await self._ask("extend_transactions", rest)

    async def _move(self) -> None:
        """Move the source's dead letters to the store. If that fails, a later call does it: nothing is lost."""
        moved: list[Any] = []
        kept: list[Any] = []  # their events are in flight elsewhere, and may be done soon
        try:
            while True:
                found = await self._ask("dead_letters", MOVED_AT_ONCE + len(kept))
                dead = [each for each in found if each.key not in kept]
                if not dead:
                    return
                if dead[0].key in moved:
                    raise RuntimeError(f"{type(self._inner).__name__}.forget_dead did not remove them")
                burials = [self._burial_of(each) for each in dead]
                buried = await self._letters.take_over(burials)
                done: list[Any] = []
                stored: list[Any] = []
                for each, burial in zip(dead, burials, strict=True):
                    if burial in buried.in_flight:
                        kept.append(each.key)
                    else:
                        is_done = burial in buried.done and self._acknowledges
                        (done if is_done else stored).append(each.key)
                moved += done + stored
                if done:
                    await self._ask(ACKNOWLEDGE, done)
                if stored:
                    await self._ask("forget_dead", stored)
        except Exception as error:  # noqa: BLE001
            _log.error("cannot move dead letters to the store; they stay in their source for now: %s", error)

    def _burial_of(self, dead: DeadMessage) -> Burial:
        burial = burial_of_dead(dead, consumer=self._consumer, origin=self._origin)
        if self._key_of is None or dead.transaction is None:
            return burial
        return msgspec.structs.replace(burial, order_key=self._key_of(dead.transaction))


class NoSource:
    """An empty source, to deliver only redriven letters."""

    def fetch_transactions(self, _: int, /) -> Sequence[Transaction]:
        return ()

    async def fetch_transactions_async(self, _: int, /) -> Sequence[Transaction]:
        return ()

    def dead_letters(self, _: int) -> Sequence[Any]:
        return ()

    async def dead_letters_async(self, _: int) -> Sequence[Any]:
        return ()

    def forget_dead(self, _: Sequence[Any]) -> None: ...

    async def forget_dead_async(self, _: Sequence[Any]) -> None: ...

    def close(self) -> None: ...

    async def close_async(self) -> None: ...
