"""The consumer engine's face: what a consumer task defines, and what it can be asked to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onceward.task import plan
from onceward.task.base import AsyncTask, Task
from onceward.task.call import does_nothing, required, run_in_tasks, run_in_threads
from onceward.task.exceptions import TransactionException
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.task.report import Report
from onceward.task.work import Outcome
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.inbox.contract import Contract


class ConsumerMixin(Task):
    """Consumes in threads. Define `process_transaction`; the handlers are optional."""

    contract: Contract | None = None
    """What this consumer promises, and what its inbox sees to."""

    @required
    def process_transaction(self, transaction: Transaction, /, *session: Any, **_: Any) -> Any:
        """Do what the transaction asks. What is returned goes to the success handler.

        With a `contract` it is `process_transaction(self, transaction, session)`, and what it writes through the
        session is committed together with the inbox's row: see `onceward.inbox`.

        Raise `TransactionException(…, category=BUSINESS)` to refuse it for good; anything else raised
        is a system failure, tried again within the policy.
        """
        raise NotImplementedError(f"{self.name} does not define process_transaction")

    @does_nothing
    def handle_transaction_success(self, transaction: Transaction, result: Any) -> None:
        """Called with what `process_transaction` returned. Its failure is a failure of the transaction."""

    @does_nothing
    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        """Called once when the transaction has failed for good."""

    def consume_transactions(self, policy: ConsumerPolicy | None = None) -> Report:
        """Fetch and process until the source is empty, the limit is reached, or `stop` is called.

        Raises `FetchException` when the source fails for good, `ConsumerLoopTimeoutException` when
        `loop.timeout` runs out, `SettlementException` when outcomes cannot be told to the source; each
        carries the report so far.
        """
        return run_in_threads(self, plan.consumer(self, policy))

    def start_processing(self, transaction: Transaction, policy: ConsumerPolicy | None = None) -> Outcome:
        """Take one transaction, from wherever, through its lifecycle. Nothing is fetched or settled."""
        kept = plan.one(plan.consumer(self, policy, fetches=False), transaction, self._asynchronous)
        run_in_threads(self, kept.wiring)
        return kept.outcome

    def _check(self) -> None:
        super()._check()
        plan.check_consumer(self)


class AsyncConsumerMixin(AsyncTask):
    """Consumes in asyncio. The same methods as `ConsumerMixin`, awaited."""

    contract: Contract | None = None

    @required
    async def process_transaction(self, transaction: Transaction, /, *session: Any, **_: Any) -> Any:
        """As `ConsumerMixin.process_transaction`."""
        raise NotImplementedError(f"{self.name} does not define process_transaction")

    @does_nothing
    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> None:
        """As `ConsumerMixin.handle_transaction_success`."""

    @does_nothing
    async def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        """As `ConsumerMixin.handle_transaction_exception`."""

    async def consume_transactions(self, policy: ConsumerPolicy | None = None) -> Report:
        """As `ConsumerMixin.consume_transactions`."""
        return await run_in_tasks(self, plan.consumer(self, policy))

    async def start_processing(
        self, transaction: Transaction, policy: ConsumerPolicy | None = None
    ) -> Outcome:
        """As `ConsumerMixin.start_processing`."""
        kept = plan.one(plan.consumer(self, policy, fetches=False), transaction, self._asynchronous)
        await run_in_tasks(self, kept.wiring)
        return kept.outcome

    def _check(self) -> None:
        super()._check()
        plan.check_consumer(self)


class ConsumerTask(ConsumerMixin):
    """Base class of a task that consumes in threads."""


class AsyncConsumerTask(AsyncConsumerMixin):
    """Base class of a task that consumes in asyncio."""
