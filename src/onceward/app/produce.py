"""Produce: send what a function returns or yields to its sink, and raise if some of it did not arrive."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from onceward._functions import check_awaitable, check_result
from onceward.app.app import Onceward, Producer
from onceward.models import as_plain_data
from onceward.task.exceptions import NotSentException, TransactionException
from onceward.task.lifecycle import text_of
from onceward.task.mixins.producer import AsyncProducerTask, ProducerTask
from onceward.task.report import Report, StopReason
from onceward.transaction import Transaction


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


def produce(app: Onceward, producer: Producer, call: Callable[[], Any]) -> Report:
    failures = Failures()
    connector = producer.sink.open(asynchronous=False)
    try:
        result = call()
        values = result if inspect.isgenerator(result) else [check_result(result, producer.function)]
        transactions = (_transaction(each, producer) for each in values if each is not None)
        task = _sender(app, producer, connector, failures)
        report: Report = task.produce_transactions(transactions, producer.policy)
        more = report.stop_reason is StopReason.LIMIT and next(transactions, None) is not None
    finally:
        connector.close()
    return _check_sent(producer, report, failures, more)


async def produce_async(app: Onceward, producer: Producer, call: Callable[[], Any]) -> Report:
    failures = Failures()
    connector = producer.sink.open(asynchronous=True)
    try:
        result = call()

        async def each_transaction() -> AsyncIterator[Transaction]:
            if inspect.isasyncgen(result):
                async for each in result:
                    if each is not None:
                        yield _transaction(each, producer)
            elif (value := await check_awaitable(result, producer.function)) is not None:
                yield _transaction(value, producer)

        transactions = each_transaction()
        task = _sender(app, producer, connector, failures)
        report: Report = await task.produce_transactions(transactions, producer.policy)
        more = report.stop_reason is StopReason.LIMIT and await anext(transactions, None) is not None
    finally:
        await connector.close_async()
    return _check_sent(producer, report, failures, more)


def _check_sent(producer: Producer, report: Report, failures: Failures, more: bool) -> Report:
    """Return the report, or raise NotSentException: the caller must not take a lost message for a sent one.

    `more` says that the limit of the policy ended the call before everything was sent.
    """
    if not report.failed:
        if not more:
            return report
        unsent = NotSentException(
            f"{producer.name}: loop.limit is {producer.policy.loop.limit}, but there was more to send; raise the limit "
            "in the policy, or remove it"
        )
        unsent.report = report
        raise unsent
    text = f"{producer.name}: {report.failed} of {report.processed} messages did not reach {producer.sink}"
    why = failures.first and (failures.first.cause or failures.first)
    error = NotSentException(text if why is None else f"{text}; the first: {text_of(why)}")
    error.report = report
    raise error from why


def _transaction(value: Any, producer: Producer) -> Transaction:
    """Payloads travel as plain data; models exist only in the functions at both ends."""
    check_result(value, producer.function)
    return value if isinstance(value, Transaction) else Transaction(payload=as_plain_data(value))
