"""Produce: send what a function returns or yields to its sink. What is due later, the outbox of the app holds."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from onceward._functions import check_awaitable, check_result
from onceward.app.send.event_types import with_event_type
from onceward.errors import ConfigurationError
from onceward.models import as_plain_data
from onceward.outbox.delay import Delayed
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.app.app import Producer
    from onceward.task.report import Report


def produce(producer: Producer, call: Callable[[], Any]) -> Report:
    result = call()
    values = result if inspect.isgenerator(result) else [check_result(result, producer.function)]
    sink = HeldSink(producer)

    def each_transaction() -> Iterator[Transaction]:
        for value in values:
            if value is not None:
                yield sink.transaction(value)

    return producer.sender.send(each_transaction(), sink)


async def produce_async(producer: Producer, call: Callable[[], Any]) -> Report:
    result = call()
    sink = HeldSink(producer)

    async def each_transaction() -> AsyncIterator[Transaction]:
        if inspect.isasyncgen(result):
            async for each in result:
                if each is not None:
                    yield sink.transaction(each)
        elif (value := await check_awaitable(result, producer.function)) is not None:
            yield sink.transaction(value)

    return await producer.sender.send_async(each_transaction(), sink)


class HeldSink:
    """The sink of one call of a producer, and what is to be held instead of sent."""

    def __init__(self, producer: Producer) -> None:
        self._app = producer.app
        self._producer = producer
        self._held: dict[str, Delayed] = {}

    def transaction(self, value: Any) -> Transaction:
        """Return what a producer made as a transaction. Payloads travel as plain data; models exist only in the
        functions at both ends."""
        check_result(value, self._producer.function)
        due = value if isinstance(value, Delayed) else None
        payload = value if due is None else due.payload
        made = payload if isinstance(payload, Transaction) else self._as_transaction(as_plain_data(payload))
        if due is not None:
            if self._app.settings.database is None:
                raise ConfigurationError(
                    f"{self._producer.name} sends a message later, which no sink holds: the app's outbox does, and "
                    f"{self._app.name} has no database for it; write Onceward({self._app.name!r}, database=…)"
                )
            self._held[made.id] = due
        return made

    def _as_transaction(self, payload: Any) -> Transaction:
        consumer = self._producer.follows
        if consumer is None:
            return Transaction(payload=payload)
        return Transaction(
            payload=payload, metadata=with_event_type(consumer.name, consumer.contract, payload)
        )

    def dispatch(self, transactions: Sequence[Transaction]) -> None:
        """Send these, or have them held in a commit of its own."""
        held, now = self._split(transactions)
        if held:
            engine = self._app.engines.take(asynchronous=False)
            try:
                with engine.begin() as connection:
                    for arguments in held:
                        self._app.outbox(connection).send(self._producer.function, **arguments)
            finally:
                self._app.engines.give_back()
        if now:
            self._producer.sender.dispatch(now)

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> None:
        """`dispatch` for asyncio."""
        held, now = self._split(transactions)
        if held:
            engine = self._app.engines.take(asynchronous=True)
            try:
                async with engine.begin() as connection:
                    for arguments in held:
                        await self._app.outbox(connection).send(self._producer.function, **arguments)
            finally:
                await self._app.engines.give_back_async()
        if now:
            await self._producer.sender.dispatch_async(now)

    def _split(
        self, transactions: Sequence[Transaction]
    ) -> tuple[list[dict[str, Any]], Sequence[Transaction]]:
        if not self._held:
            return [], transactions
        held = [
            {
                "payload": each.payload,
                "id": each.id,
                "headers": each.metadata,
                "delay": due.delay,
                "at": due.at,
                "key": due.key,
            }
            for each in transactions
            if (due := self._held.get(each.id)) is not None
        ]
        return held, [each for each in transactions if each.id not in self._held]
