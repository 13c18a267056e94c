"""Producing: what a function returns or yields goes to its sink, or the caller hears that it did not."""

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
    """Of one call. The first tells why; there may be as many as there are messages."""

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
    """The task that sends what a producer makes, with the producer's name: telemetry goes by it."""
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
        given = result if inspect.isgenerator(result) else [result]
        task = _sender(app, producer, connector, failures)
        report: Report = task.produce_transactions(
            (_transaction(each) for each in given if each is not None), producer.policy
        )
    finally:
        connector.close()
    return _all_sent(producer, report, failures)


async def produce_async(
    app: Onceward, producer: Producer, args: Iterable[Any], kwargs: dict[str, Any]
) -> Report:
    failures = Failures()
    connector = producer.sink.open(asynchronous=True)
    try:
        result = producer.function(*args, **kwargs)

        async def given() -> AsyncIterator[Transaction]:
            if inspect.isasyncgen(result):
                async for each in result:
                    if each is not None:
                        yield _transaction(each)
            elif (value := await result) is not None:
                yield _transaction(value)

        task = _sender(app, producer, connector, failures)
        report: Report = await task.produce_transactions(given(), producer.policy)
    finally:
        await connector.close_async()
    return _all_sent(producer, report, failures)


def _all_sent(producer: Producer, report: Report, failures: Failures) -> Report:
    """Who calls a producer must not believe that a message is on its way when it is not."""
    if not report.failed:
        return report
    text = f"{producer.name}: {report.failed} of {report.processed} messages did not get to {producer.sink}"
    why = failures.first and (failures.first.cause or failures.first)
    error = NotSentException(text if why is None else f"{text}; the first: {text_of(why)}")
    error.report = report
    raise error from why


def _transaction(value: Any) -> Transaction:
    """A payload in plain data: models are for the functions at both ends."""
    import msgspec

    return (
        value
        if isinstance(value, Transaction)
        else Transaction(payload=msgspec.to_builtins(value, enc_hook=_dumped))
    )


def _dumped(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__qualname__} cannot be sent; a payload is plain data, or a model of it")
