"""Produce: send what a function returns or yields to its sink, and raise if some of it did not arrive."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from onceward.app.app import Onceward, Producer
from onceward.task.exceptions import NotSentException, TransactionException
from onceward.task.lifecycle import text_of
from onceward.task.mixins.producer import AsyncProducerTask, ProducerTask
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.task.report import Report


class Failures:
    """Keeps the first failure of a call as the reason; there may be as many as there are messages."""

    first: TransactionException | None = None

    def add(self, error: TransactionException) -> None:
        self.first = self.first or error


class _Send(ProducerTask):
    def produce_transaction(self, transaction: Transaction) -> None:
        self.connectors["sink"].dispatch_transactions([transaction])

    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        self.services["failures"].add(exc)


class _AsyncSend(AsyncProducerTask):
    async def produce_transaction(self, transaction: Transaction) -> None:
        await self.connectors["sink"].dispatch_transactions_async([transaction])

    async def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        self.services["failures"].add(exc)


def _sender(app: Onceward, producer: Producer, connector: Any, failures: Failures) -> Any:
    """Build the task that sends what a producer makes. It has the producer's name, which telemetry reports."""
    kind = _AsyncSend if producer.asynchronous else _Send
    body = {
        "middleware": app.middleware,
        "__module__": producer.function.__module__,
        "__doc__": producer.function.__doc__,
    }
    sender = type(producer.name, (kind,), body)
    return sender({"sink": connector}, {"failures": failures}, settings=app.settings.engine)


def produce(app: Onceward, producer: Producer, args: Iterable[Any], kwargs: dict[str, Any]) -> Report:
    failures = Failures()
    connector = producer.sink.open(asynchronous=False)
    try:
        result = producer.function(*args, **kwargs)
        values = result if inspect.isgenerator(result) else [result]
        task = _sender(app, producer, connector, failures)
        report: Report = task.produce_transactions(
            (_transaction(each) for each in values if each is not None), producer.policy
        )
    finally:
        connector.close()
    return _check_sent(producer, report, failures)


async def produce_async(
    app: Onceward, producer: Producer, args: Iterable[Any], kwargs: dict[str, Any]
) -> Report:
    failures = Failures()
    connector = producer.sink.open(asynchronous=True)
    try:
        result = producer.function(*args, **kwargs)

        async def transactions() -> AsyncIterator[Transaction]:
            if inspect.isasyncgen(result):
                async for each in result:
                    if each is not None:
                        yield _transaction(each)
            elif (value := await result) is not None:
                yield _transaction(value)

        task = _sender(app, producer, connector, failures)
        report: Report = await task.produce_transactions(transactions(), producer.policy)
    finally:
        await connector.close_async()
    return _check_sent(producer, report, failures)


def _check_sent(producer: Producer, report: Report, failures: Failures) -> Report:
    """Return the report, or raise NotSentException: the caller must not take a lost message for a sent one."""
    if not report.failed:
        return report
    text = f"{producer.name}: {report.failed} of {report.processed} messages did not reach {producer.sink}"
    why = failures.first and (failures.first.cause or failures.first)
    error = NotSentException(text if why is None else f"{text}; the first: {text_of(why)}")
    error.report = report
    raise error from why


def _transaction(value: Any) -> Transaction:
    """Payloads travel as plain data; models exist only in the functions at both ends."""
    import msgspec

    return (
        value
        if isinstance(value, Transaction)
        else Transaction(payload=msgspec.to_builtins(value, enc_hook=_dump))
    )


def _dump(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__qualname__} cannot be sent; a payload must be plain data or a model")
