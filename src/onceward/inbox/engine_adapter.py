"""The inbox under the engine: what is put around a consumer's source and its main step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from onceward._sync import run_blocking
from onceward.inbox.attempts import End, Start
from onceward.inbox.contract import Contract
from onceward.inbox.errors import ContractError
from onceward.inbox.event import Event
from onceward.inbox.metrics import instruments
from onceward.inbox.processor import DONE, EventProcessor
from onceward.inbox.registry import Registry
from onceward.inbox.sessions.rules import Raised, as_raised
from onceward.inbox.stores.types import Key
from onceward.task.lifecycle import Step
from onceward.task.source import Source
from onceward.task.work import DUPLICATE
from onceward.transaction import Settlement, Transaction, Verdict

_log = logging.getLogger("onceward.inbox")


class Expected(msgspec.Struct, frozen=True):
    """A fetched transaction whose start has been written down."""

    transaction: Transaction
    """Kept, so that its identity is not another's meanwhile."""
    event: Event
    key: Key
    start: Start


class _Served:
    """One call of a consumer. Written for both modes; the subclasses say how to call."""

    def __init__(self, core: EventProcessor, registry: Registry, task: Any, contract: Contract) -> None:
        self._core = core
        self._registry = registry
        self._task = task
        self._contract = contract
        self._metrics = instruments()
        self._expected: dict[int, Expected] = {}

    async def _begin(self) -> None:
        await self._registry.check(self._contract, type(self._task))

    async def _process(self, transaction: Transaction) -> Any:
        expected = self._expected.pop(id(transaction), None)
        event = Event.of(transaction) if expected is None else expected.event

        def handle(current: Event, session: Any) -> Any:
            payload = current.payload
            shown = transaction
            if payload is not transaction.payload:
                shown = msgspec.structs.replace(transaction, payload=payload)
            return self._task.process_transaction(shown, session)

        start = None if expected is None else expected.start
        result = await self._core.process(self._contract, event, handle, self._metrics, start)
        return result.value if result.handling is DONE else DUPLICATE

    async def _expect(self, batch: Sequence[Transaction]) -> None:
        """Write down the starts of a batch. Where that fails, each writes its own when its turn comes."""
        seen: list[tuple[Transaction, Event, Key]] = []
        # An effectful one writes down its start, which is its claim, when its turn comes.
        for transaction in batch if self._contract.mode == "transactional" else ():
            try:
                event = Event.of(transaction)
                seen.append(
                    (transaction, event, Key(self._contract.consumer_id, event.tracking_id, event.day))
                )
            except ContractError:
                continue  # it is refused when its turn comes
        try:
            starts = await self._core.ledger.expect(self._contract, [key for _, _, key in seen])
        except Exception as error:  # noqa: BLE001
            if not self._core.availability.is_to_blame(error):  # of which each will say so
                _log.warning("the starts of a batch could not be written down together: %s", error)
            return
        for transaction, event, key in seen:
            start = starts.pop(key.tracking_id, None)
            if start is not None:
                self._expected[id(transaction)] = Expected(transaction, event, key, start)

    async def _returned(self, settlements: Sequence[Settlement]) -> None:
        """What was fetched and not begun: its start has an end."""
        ends = []
        for settlement in settlements:
            if settlement.verdict is Verdict.RETURNED:
                expected = self._expected.pop(id(settlement.transaction), None)
                if expected is not None:
                    ends.append(End(expected.key, expected.start.token, "it was given back before it began"))
        await self._core.ledger.end_all(ends)

    async def _end(self) -> None:
        """Whatever is left was never begun, even if the source could not be told so."""
        left = [self._expected.pop(key, None) for key in list(self._expected)]
        await self._core.ledger.end_all(
            [End(each.key, each.start.token, "the call ended before it began") for each in left if each]
        )

    async def _extended(self, transactions: Sequence[Transaction]) -> None:
        if self._contract.mode == "effectful":
            return
        try:
            tracking_ids = [Event.of(transaction).tracking_id for transaction in transactions]
            await self._core.ledger.extend(self._contract, tracking_ids)
        except Exception as error:  # noqa: BLE001  a copy elsewhere would be told busy all the same
            _log.warning("the leases of %d starts could not be extended: %s", len(transactions), error)

    def around(self, source: Source) -> Source:
        """The source, with what is fetched, extended and given back written down."""
        changes: dict[str, Step] = {"fetch": _replaced(source.fetch, self._fetching)}
        if source.settle is not None:
            changes["settle"] = _replaced(source.settle, self._settling)
        if source.extend is not None:
            changes["extend"] = _replaced(source.extend, self._extending)
        return msgspec.structs.replace(source, **changes)

    def _fetching(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError

    def _settling(self, settle: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError

    def _extending(self, extend: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError


class Served(_Served):
    def begin(self) -> None:
        run_blocking(self._begin())

    def end(self) -> None:
        run_blocking(self._end())

    def process(self, transaction: Transaction, /) -> Any:
        try:
            return run_blocking(self._process(transaction))
        except Raised as carried:
            raised = as_raised(carried)
        raise raised

    def _fetching(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def fetching(*args: Any, **extra: Any) -> Any:
            run_blocking(self._core.availability.check(self._contract.consumer_id))
            batch = fetch(*args, **extra)
            run_blocking(self._expect(batch or ()))
            return batch

        return fetching

    def _settling(self, settle: Callable[..., Any]) -> Callable[..., Any]:
        def settling(settlements: Sequence[Settlement]) -> None:
            settle(settlements)
            run_blocking(self._returned(settlements))

        return settling

    def _extending(self, extend: Callable[..., Any]) -> Callable[..., Any]:
        def extending(transactions: Sequence[Transaction]) -> None:
            extend(transactions)
            run_blocking(self._extended(transactions))

        return extending


class AsyncServed(_Served):
    async def begin(self) -> None:
        await self._begin()

    async def end(self) -> None:
        await self._end()

    async def process(self, transaction: Transaction, /) -> Any:
        try:
            return await self._process(transaction)
        except Raised as carried:
            raised = carried.raised
        raise raised

    def _fetching(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        async def fetching(*args: Any, **extra: Any) -> Any:
            await self._core.availability.check(self._contract.consumer_id)
            batch = await fetch(*args, **extra)
            await self._expect(batch or ())
            return batch

        return fetching

    def _settling(self, settle: Callable[..., Any]) -> Callable[..., Any]:
        async def settling(settlements: Sequence[Settlement]) -> None:
            await settle(settlements)
            await self._returned(settlements)

        return settling

    def _extending(self, extend: Callable[..., Any]) -> Callable[..., Any]:
        async def extending(transactions: Sequence[Transaction]) -> None:
            await extend(transactions)
            await self._extended(transactions)

        return extending


def _replaced(step: Step, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Step:
    return msgspec.structs.replace(step, call=around(step.call))
