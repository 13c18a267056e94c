"""Order as middleware: has the source deliver only the first event of each key, and gives back those that wait for a
dead one.

    source: only the first of each key ──► no letter of the key? ──► inbox ──► handler
                                             └─ there is one: back to the source, for a while

The source moves a dead message to the store of dead letters before it lets the next one of its key go. So the process
that gets the next one finds the letter there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from onceward.errors import ConfigurationError
from onceward.inbox.errors import Breach, ContractError
from onceward.middleware import Middleware, SourceCalls, StepCall, StepInfo, sleep
from onceward.order.holds import NOTHING_HELD, HeldKeys, HoldReader
from onceward.order.rule import NoKey, OrderRule
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

_log = OwnLogger(logging.getLogger("onceward.order"))

SHORTEST, LONGEST = 0.5, 10.0
"""Seconds until a held event is looked at again: a tenth of the time that it is held, within these bounds."""
NOTE_EVERY = 2.0
"""Seconds between two notes of what waits behind letters."""
NOTED, IDS = 100, 20
"""Keys for which that is noted, and ids for each."""
NAP = 0.1
"""Seconds that a consumer sleeps at a time while too many of its keys are held."""


class KeepOrder(Middleware):
    """Runs events of one key one after another, in the order of their arrival."""

    name = "order"

    def __init__(self, rule: OrderRule, holds: HoldReader, consumer_id: str) -> None:
        self._rule = rule
        self._holds = holds
        self._consumer = consumer_id
        self._keyless: dict[str, str] = {}
        """Why events in flight have no key, by their ids."""
        self.held: HeldKeys = NOTHING_HELD
        self._noted_at = 0.0
        self._stopped = False

    def bind(self, task: Any) -> Middleware:
        self._now = task.clock.now
        return self

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        if step.name != "process":
            return call

        async def process(given: Any, *more: Any) -> Any:
            if self._keyless:
                for each in given if isinstance(given, list) else [given]:
                    if each.id in self._keyless:
                        raise ContractError(
                            f"it has no key for order_by: {self._keyless[each.id]}", Breach.ENVELOPE, each.id
                        )
            return await call(given, *more)

        return process

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        connector = source.connector
        if not hasattr(connector, "keep_order"):
            raise ConfigurationError(
                f"{self._consumer} has order_by, but {type(connector).__name__} has no keep_order, so it cannot "
                "deliver only the first event of each key; leave order_by out, or use another source"
            )
        connector.keep_order(self._rule.key_of, hold_dead=self._rule.holds)

        async def fetch(size: int, **extra: Any) -> Sequence[Transaction]:
            batch = await source.fetch(size, **extra)
            if not batch:
                return batch
            keys = self._find_keys(batch)
            return await self._without_held(source, batch, keys) if self._rule.holds else batch

        async def settle(settlements: Sequence[Settlement]) -> None:
            assert source.settle is not None
            for each in settlements if self._keyless else ():
                self._keyless.pop(each.transaction.id, None)
            await source.settle(settlements)

        return source.replace(fetch=fetch, settle=settle)

    def _find_keys(self, batch: Sequence[Transaction]) -> Sequence[str | None]:
        try:
            return [*map(self._rule.find_key, batch)]
        except NoKey:
            return [self._find_key(each) for each in batch]

    def _find_key(self, transaction: Transaction) -> str | None:
        try:
            return self._rule.find_key(transaction)
        except NoKey as error:
            self._keyless[transaction.id] = str(error)
            return None

    async def _without_held(
        self, source: SourceCalls, batch: Sequence[Transaction], keys: Sequence[str | None]
    ) -> Sequence[Transaction]:
        """Give back those whose keys are held."""
        assert source.settle is not None
        self.held = held = await self._holds.read()
        await self._note(source)
        if not held.letters:
            return batch
        too_many = self._is_too_much(len(held.holders))
        free: list[Transaction] = []
        returned: list[Settlement] = []
        for transaction, key in zip(batch, keys, strict=True):
            holder = None if key is None else held.holder_of(key, transaction)
            if holder is not None:
                delay = min(max(holder.seconds / 10, SHORTEST), LONGEST)
                returned.append(Settlement(transaction, Verdict.RETURNED, None, delay))
            elif too_many and not (key is not None and held.is_letter(key, transaction)):
                returned.append(Settlement(transaction, Verdict.RETURNED, None, LONGEST))
            else:
                free.append(transaction)
        if returned:
            await source.settle(returned)
        if too_many and not free:
            await sleep(NAP)
        return free

    def _is_too_much(self, keys: int) -> bool:
        """Whether so many keys are held that nothing but redriven letters goes on."""
        if (keys >= self._rule.most_held) != self._stopped:
            self._stopped = not self._stopped
            if self._stopped:
                _log.error(
                    "consumer %s waits: dead letters hold %d of its keys, and most_held is %d; something is wrong "
                    "with more than single events. Redrive or discard them (onceward dlq list --consumer %s), and it "
                    "goes on",
                    self._consumer, keys, self._rule.most_held, self._consumer,
                )  # fmt: skip
            else:
                _log.warning("consumer %s goes on: dead letters hold %d of its keys", self._consumer, keys)
        return self._stopped

    async def _note(self, source: SourceCalls) -> None:
        """Note what waits behind the letters, for people, if it is time."""
        if not self.held.letters or self._now() - self._noted_at < NOTE_EVERY:
            return
        self._noted_at = self._now()
        try:
            behind = await source.ask("lines_behind", list(self.held.holders)[:NOTED], IDS)
            await self._holds.note(behind)
        except Exception as error:  # noqa: BLE001  only people miss it
            _log.info("cannot note what waits behind dead letters of %s: %s", self._consumer, error)
