"""The producer engine's face: what a producer task defines, and what it can be asked to do."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import Any

from onceward.task import plan
from onceward.task.base import AsyncTask, Task
from onceward.task.call import does_nothing, required, run_in_tasks, run_in_threads
from onceward.task.exceptions import TransactionException
from onceward.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from onceward.task.mixins.policies import ProducerPolicy
from onceward.task.report import Report
from onceward.task.work import Outcome
from onceward.transaction import Transaction


class ProducerMixin(Task):
    """Produces in threads. Define `produce_transaction`; the handlers are optional."""

    @required
    def produce_transaction(self, transaction: Transaction) -> Any:
        """Hand the transaction on, through a connector or service. What is returned goes to the success handler.

        Raise `TransactionException(…, category=BUSINESS)` to refuse it for good; anything else raised
        is a system failure, tried again within the policy.
        """
        raise NotImplementedError(f"{self.name} does not define produce_transaction")

    @does_nothing
    def handle_produce_success(self, transaction: Transaction, result: Any) -> None:
        """Called with what `produce_transaction` returned. Whatever it raises is a system failure."""

    @does_nothing
    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        """Called once when the transaction has failed for good."""

    def produce_transactions(
        self, transactions: Iterable[Transaction], policy: ProducerPolicy | None = None
    ) -> Report:
        """Produce all of these, a batch at a time, in order; never holds more than a batch of them.

        Raises `ProducerLoopTimeoutException` when `loop.timeout` runs out, `InputException` when the
        iterable raises; each carries the report so far.
        """
        return run_in_threads(self, plan.producer(self, policy, transactions))

    def start_producing(self, transaction: Transaction, policy: ProducerPolicy | None = None) -> Outcome:
        """Take one transaction through its lifecycle, and return how it ended."""
        kept = plan.one(plan.producer(self, policy, ()), transaction, self._asynchronous)
        run_in_threads(self, kept.wiring)
        return kept.outcome

    def _check(self) -> None:
        super()._check()
        plan.check_handlers(self, plan.PRODUCER_HANDLERS)


class AsyncProducerMixin(AsyncTask):
    """Produces in asyncio. The same methods as `ProducerMixin`, awaited."""

    @required
    async def produce_transaction(self, transaction: Transaction) -> Any:
        """As `ProducerMixin.produce_transaction`."""
        raise NotImplementedError(f"{self.name} does not define produce_transaction")

    @does_nothing
    async def handle_produce_success(self, transaction: Transaction, result: Any) -> None:
        """As `ProducerMixin.handle_produce_success`."""

    @does_nothing
    async def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        """As `ProducerMixin.handle_produce_exception`."""

    async def produce_transactions(
        self,
        transactions: Iterable[Transaction] | AsyncIterable[Transaction],
        policy: ProducerPolicy | None = None,
    ) -> Report:
        """As `ProducerMixin.produce_transactions`; the iterable may be asynchronous."""
        return await run_in_tasks(self, plan.producer(self, policy, transactions))

    async def start_producing(
        self, transaction: Transaction, policy: ProducerPolicy | None = None
    ) -> Outcome:
        """As `ProducerMixin.start_producing`."""
        kept = plan.one(plan.producer(self, policy, ()), transaction, self._asynchronous)
        await run_in_tasks(self, kept.wiring)
        return kept.outcome

    def _check(self) -> None:
        super()._check()
        plan.check_handlers(self, plan.PRODUCER_HANDLERS)


class ProducerTask(ProducerMixin):
    """Base class of a task that produces in threads."""


class AsyncProducerTask(AsyncProducerMixin):
    """Base class of a task that produces in asyncio."""


class HybridTask(ConsumerMixin, ProducerMixin):
    """Base class of a task that both consumes and produces, in threads."""


class AsyncHybridTask(AsyncConsumerMixin, AsyncProducerMixin):
    """Base class of a task that both consumes and produces, in asyncio."""
