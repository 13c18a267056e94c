"""Base classes of producers and hybrids: what a producer task defines, and how to run it."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import Any

from onceward.task import plan
from onceward.task.base import AsyncTask, Task
from onceward.task.call import does_nothing, required, run_in_tasks, run_in_threads
from onceward.task.exceptions import TransactionException
from onceward.task.mixins import checks
from onceward.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from onceward.task.mixins.policies import ProducerPolicy
from onceward.task.report import Report
from onceward.task.work import Outcome
from onceward.transaction import Transaction


class ProducerMixin(Task):
    """Produces in threads. Define `produce_transaction`; the handlers are optional."""

    @required
    def produce_transaction(self, transaction: Transaction) -> Any:
        """Send the transaction through a connector or service. The success handler gets the return value.

        Raise `TransactionException(…, category=BUSINESS)` to reject it permanently; any other error is a system
        failure, retried under the policy.
        """
        raise NotImplementedError(f"{self.name} does not define produce_transaction")

    @does_nothing
    def handle_produce_success(self, transaction: Transaction, result: Any) -> None:
        """Called with the result of `produce_transaction`. Anything it raises is a system failure."""

    @does_nothing
    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        """Called once, when the transaction has failed permanently."""

    def produce_transactions(
        self, transactions: Iterable[Transaction], policy: ProducerPolicy | None = None
    ) -> Report:
        """Produce all of these in order, a batch at a time; never holds more than one batch.

        Raises `ProducerLoopTimeoutException` if `loop.timeout` runs out, `InputException` if the iterable raises; each
        carries the report so far.
        """
        return run_in_threads(self, plan.producer(self, policy, transactions))

    def start_producing(self, transaction: Transaction, policy: ProducerPolicy | None = None) -> Outcome:
        """Take one transaction through its lifecycle, and return how it ended."""
        run = plan.single_run(plan.producer(self, policy, ()), transaction, self.asynchronous)
        run_in_threads(self, run.wiring)
        return run.outcome

    def _check(self) -> None:
        super()._check()
        checks.check_handlers(self, checks.PRODUCER_HANDLERS)


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
        run = plan.single_run(plan.producer(self, policy, ()), transaction, self.asynchronous)
        await run_in_tasks(self, run.wiring)
        return run.outcome

    def _check(self) -> None:
        super()._check()
        checks.check_handlers(self, checks.PRODUCER_HANDLERS)


class ProducerTask(ProducerMixin):
    """Base class of a task that produces in threads."""


class AsyncProducerTask(AsyncProducerMixin):
    """Base class of a task that produces in asyncio."""


class HybridTask(ConsumerMixin, ProducerMixin):
    """Base class of a task that both consumes and produces, in threads."""


class AsyncHybridTask(AsyncConsumerMixin, AsyncProducerMixin):
    """Base class of a task that both consumes and produces, in asyncio."""
