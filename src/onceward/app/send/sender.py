"""Send transactions to one address, over a connector that the process keeps open.

A policy that asks for nothing, without middleware and telemetry, needs no engine: then batches go to the connector as
they are. Otherwise each transaction is a lifecycle of a producer task.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from math import inf
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

from onceward._sync import run_blocking
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.codec import PayloadError
from onceward.connectors.kept import kept
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.outbox.sinks import is_outage
from onceward.task.cancellation import raise_if_cancelled
from onceward.task.exceptions import (
    ExceptionCategory,
    NotSentException,
    TransactionException,
    failure_category,
)
from onceward.task.lifecycle import text_of
from onceward.task.loops import input_error
from onceward.task.mixins.policies import ProducerPolicy
from onceward.task.mixins.producer import AsyncProducerTask, ProducerTask
from onceward.task.report import Report, StopReason
from onceward.telemetry.context import current_work
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.metrics import is_on
from onceward.telemetry.redaction import scrub
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.app.app import Onceward
    from onceward.app.send.produce import HeldSink

logger = OwnLogger(logging.getLogger("onceward.engine"))

BATCH = 500
"""Messages that are sent together at most."""
PATIENCE = 0.02
"""Seconds that a message waits at most for the next ones of its batch, unless the caller takes longer to make one."""
PLAIN = ProducerPolicy()

Batch = Sequence[Transaction]


class Sender:
    """Sends what one consumer or producer of an app is given."""

    def __init__(
        self, app: Onceward, name: str, sink: Address, policy: ProducerPolicy, function: Callable[..., Any]
    ) -> None:
        self.app = app
        self.name = name
        self.sink = sink
        self.policy = policy
        self.function = function
        self._is_plain = policy == PLAIN
        self._warned: set[str] = set()

    @property
    def needs_engine(self) -> bool:
        return bool(
            not self._is_plain or self.app.middleware or is_on() or self.app.settings.engine.io_guard != "off"
        )

    def send(self, transactions: Iterator[Transaction], sink: HeldSink | None = None) -> Report:
        """Send all of these, in order, through `sink` if it is given. Raises `NotSentException` if some did not
        arrive, `InputException` if the iterator raises."""
        self._begin()
        if self.needs_engine:
            failures = Failures()
            task = self._task(_Send, failures, sink)
            report: Report = task.produce_transactions(transactions, self.policy)
            more = report.stop_reason is StopReason.LIMIT and next(transactions, None) is not None
            return self.check(report, failures, more)

        async def fill(load: SendLoad) -> bool:
            return load.fill(transactions)

        async def send(batch: Batch) -> None:
            (sink or self).dispatch(batch)

        return run_blocking(self._send_batches(fill, send))

    async def send_async(
        self, transactions: AsyncIterator[Transaction], sink: HeldSink | None = None
    ) -> Report:
        """`send` in asyncio."""
        self._begin()
        if self.needs_engine:
            failures = Failures()
            task = self._task(_AsyncSend, failures, sink)
            report: Report = await task.produce_transactions(transactions, self.policy)
            more = report.stop_reason is StopReason.LIMIT and await anext(transactions, None) is not None
            return self.check(report, failures, more)

        async def fill(load: SendLoad) -> bool:
            async for transaction in transactions:
                if load.add(transaction):
                    return True
            return False

        return await self._send_batches(fill, (sink or self).dispatch_async)

    def send_one(self, transaction: Transaction) -> None:
        """`send` one."""
        if current_work.get() is not None:
            self._begin()
        if self.needs_engine:
            self.send(iter((transaction,)))
            return
        try:
            self.dispatch((transaction,))
        except Exception as error:
            raise self._not_sent(transaction, error) from error

    async def send_one_async(self, transaction: Transaction) -> None:
        """`send_one` in asyncio."""
        self._begin()
        if self.needs_engine:
            await self.send_async(each_of((transaction,)))
            return
        try:
            await self.dispatch_async((transaction,))
        except Exception as error:
            raise self._not_sent(transaction, error) from error

    def dispatch(self, batch: Batch) -> None:
        """Send these over the kept connector. One that fails is replaced for the next call, and the error raised."""
        thread, sending = get_ident(), kept.sending
        if thread in sending:
            # A signal handler or a finalizer has interrupted a send of this thread. What that one holds, such as its
            # turn at the kept connector, it cannot give back before this returns.
            with self.sink.open(asynchronous=False) as own:
                own.dispatch_transactions(batch)
            return
        try:
            sending.add(thread)
            self._dispatch_kept(batch)
        finally:
            sending.discard(thread)

    def _dispatch_kept(self, batch: Batch) -> None:
        while True:
            connector = kept.take(self.sink)
            try:
                connector.dispatch_transactions(batch)
                return
            except ConnectorClosedError:  # it failed in another thread, and was closed before this was sent
                kept.drop(self.sink, connector)
            except PayloadError:
                raise
            except Exception:
                kept.drop(self.sink, connector)
                raise

    async def dispatch_async(self, batch: Batch) -> None:
        """`dispatch` in asyncio."""
        while True:
            connector = await kept.take_async(self.sink)
            try:
                await connector.dispatch_transactions_async(batch)
                return
            except ConnectorClosedError:
                await kept.drop_async(self.sink, connector)
            except PayloadError:
                raise
            except Exception:
                await kept.drop_async(self.sink, connector)
                raise

    async def _send_batches(
        self, fill: Callable[[SendLoad], Awaitable[bool]], send: Callable[[Batch], Awaitable[None]]
    ) -> Report:
        """Send without the engine, until `fill` has no more. Written for both modes: see `onceward._sync`."""
        tally = SendTally(self)
        more = True
        while more:
            load = SendLoad()
            try:
                more = await fill(load)
            except Exception as error:  # noqa: BLE001  of the caller's iterable; raised at the end
                tally.input_error, more = error, False
            if load.batch:
                await self._send_batch(load.batch, send, tally)
        return tally.end()

    async def _send_batch(
        self, batch: Batch, send: Callable[[Batch], Awaitable[None]], tally: SendTally
    ) -> None:
        try:
            await send(batch)
            tally.report.succeeded += len(batch)
        except Exception as error:  # noqa: BLE001  counted, and raised at the end
            if len(batch) == 1 or is_outage(error):
                tally.fail(batch, error)
                return
            for each in batch:  # only some of them are to blame
                await self._send_batch((each,), send, tally)

    def _task(self, kind: type[Any], failures: Failures, sink: HeldSink | None) -> Any:
        """The task that sends. It has the name of the function, which telemetry reports."""
        body = {
            "middleware": self.app.middleware,
            "destination": self.sink.destination,
            "__module__": self.function.__module__,
            "__doc__": self.function.__doc__,
        }
        made = type(self.name, (kind,), body)
        return made({}, {"sink": sink or self, "failures": failures}, settings=self.app.settings.engine)

    # ── errors ──────────────────────────────────────────────────────────────────────────────────────────

    def check(self, report: Report, failures: Failures, more: bool = False) -> Report:
        """Return the report, or raise `NotSentException`: the caller must not take a lost message for a sent one.

        `more` says that the limit of the policy ended the call before everything was sent.
        """
        if not report.failed:
            if not more:
                return report
            unsent = NotSentException(
                f"{self.name}: loop.limit is {self.policy.loop.limit}, but there was more to send; raise the limit "
                "in the policy, or remove it"
            )
            unsent.report = report
            raise unsent
        text = f"{self.name}: {report.failed} of {report.processed} messages did not reach {self.sink}"
        why = failures.first and (failures.first.cause or failures.first)
        error = NotSentException(text if why is None else f"{text}; the first: {text_of(why)}")
        error.report = report
        raise error from why

    def _not_sent(self, transaction: Transaction, error: Exception) -> NotSentException:
        tally = SendTally(self)
        tally.fail((transaction,), error)
        unknown = (
            f"; if it was lost on the way back, it has arrived: to send it again, give it the same id, "
            f"{transaction.id!r}"
            if is_outage(error) and not isinstance(error, ConfigurationError | ConnectorClosedError)
            else ""
        )
        made = NotSentException(
            f"{self.name}: 1 of 1 messages did not reach {self.sink}: {text_of(error)}{unknown}"
        )
        made.report = tally.report
        return made

    def _begin(self) -> None:
        work = current_work.get()
        if work is not None:
            raise_if_cancelled()
            self._warn_in_handler(work.task)

    def _warn_in_handler(self, task: str) -> None:
        """Sending around the transaction of a handler with a contract is what `onceward verify` fails for."""
        consumer = self.app.consumers.get(task)
        if consumer is None or consumer.contract is None or consumer.contract.mode == "effectful":
            return
        if task not in self._warned:
            self._warned.add(task)
            logger.warning(
                "%s sends to %s outside of its transaction: the message is sent even if the handler fails, and again "
                "with each attempt. Use session.send(%s, …), which sends it if and when the transaction commits; "
                "`onceward verify` refuses the other way",
                task, self.name, self.name,
            )  # fmt: skip


class SendLoad:
    """Messages that are sent together."""

    def __init__(self) -> None:
        self.batch: list[Transaction] = []
        self._due = inf

    def fill(self, transactions: Iterator[Transaction]) -> bool:
        """`add` these, as far as the load goes. Return whether there may be more."""
        batch, due = self.batch, inf
        for transaction in transactions:
            batch.append(transaction)
            now = monotonic()
            if due == inf:
                due = now + PATIENCE
            elif now >= due or len(batch) >= BATCH:
                return True
        return False

    def add(self, transaction: Transaction) -> bool:
        """Return whether it is time to send them."""
        self.batch.append(transaction)
        now = monotonic()
        if self._due == inf:
            self._due = now + PATIENCE
        return now >= self._due or len(self.batch) >= BATCH


class Failures:
    """Keeps the first failure of a call as the reason; there may be as many as there are messages."""

    first: TransactionException | None = None

    def add(self, error: TransactionException) -> None:
        self.first = self.first or error


class SendTally:
    """What a call without the engine has sent so far."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._began = monotonic()
        self._failures = Failures()
        self.report = Report(stop_reason=StopReason.DONE)
        self.input_error: Exception | None = None

    def fail(self, batch: Batch, error: Exception) -> None:
        """Count and log these as not sent."""
        scrub(error)
        wrapped = error if isinstance(error, TransactionException) else None
        self._failures.add(
            wrapped or TransactionException(text_of(error), ExceptionCategory.SYSTEM, batch[0].id, error)
        )
        self.report.failed += len(batch)
        self.report.failed_by_category[failure_category(error)] += len(batch)
        first = self.report.failed == len(batch)  # the traceback of the first is enough
        logger.error(
            "produce gave up: %s did not reach %s: %s",
            f"transaction {batch[0].id}" if len(batch) == 1 else f"{len(batch)} transactions",
            self._sender.sink, text_of(error),
            exc_info=error if first else None, extra={"task": self._sender.name},
        )  # fmt: skip

    def end(self) -> Report:
        """Return the report, or raise."""
        self.report.duration = monotonic() - self._began
        if self.input_error is not None:
            self.report.stop_reason = StopReason.INPUT_ERROR
            raised = input_error(self.input_error)
            raised.report = self.report
            raise raised
        return self._sender.check(self.report, self._failures)


class _Send(ProducerTask):
    def produce_transaction(self, transaction: Transaction) -> None:
        self.services["sink"].dispatch((transaction,))

    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        self.services["failures"].add(exc)


class _AsyncSend(AsyncProducerTask):
    async def produce_transaction(self, transaction: Transaction) -> None:
        await self.services["sink"].dispatch_async((transaction,))

    async def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        self.services["failures"].add(exc)


async def each_of(transactions: Iterable[Transaction]) -> AsyncIterator[Transaction]:
    for transaction in transactions:
        yield transaction
