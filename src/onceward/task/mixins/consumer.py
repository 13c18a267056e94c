"""Base classes of consumers: what a consumer task defines, and how to run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onceward.task import plan
from onceward.task.base import AsyncTask, Task
from onceward.task.call import does_nothing, required, run_in_tasks, run_in_threads
from onceward.task.exceptions import TransactionException
from onceward.task.mixins import checks
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.task.report import Report
from onceward.task.work import Outcome
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.inbox.commits.group import Commit
    from onceward.inbox.contract import Contract


class ConsumerMixin(Task):
    """Consumes in threads. Define `process_transaction`; the handlers are optional."""

    contract: Contract | None = None
    """What this consumer guarantees; its inbox enforces it."""
    commit: Commit | None = None
    """Whether events that wait together share a commit ("group") or each has its own ("each"). None: "group" on SQLite,
    "each" on PostgreSQL."""

    @required
    def process_transaction(self, transaction: Transaction, /, *session: Any, **_: Any) -> Any:
        """Process the transaction. The success handler gets the return value.

        With a `contract`, the signature is `process_transaction(self, transaction, session)`; writes through the
        session are committed together with the inbox's row: see `onceward.inbox`.

        Raise `TransactionException(…, category=BUSINESS)` to reject it permanently; any other error is a system
        failure, retried under the policy.
        """
        raise NotImplementedError(f"{self.name} does not define process_transaction")

    @does_nothing
    def handle_transaction_success(self, transaction: Transaction, result: Any) -> None:
        """Called with the result of `process_transaction`. If it fails, the transaction fails."""

    @does_nothing
    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        """Called once, when the transaction has failed permanently."""

    def consume_transactions(self, policy: ConsumerPolicy | None = None) -> Report:
        """Fetch and process until the source is empty, the limit is reached, or `stop` is called.

        Raises `FetchException` if the source fails permanently, `ConsumerLoopTimeoutException` if `loop.timeout` runs
        out, `SettlementException` if outcomes cannot be settled; each carries the report so far.
        """
        return run_in_threads(self, plan.consumer(self, policy))

    def start_processing(self, transaction: Transaction, policy: ConsumerPolicy | None = None) -> Outcome:
        """Take this transaction through its lifecycle, and return how it ended. Nothing is fetched or settled."""
        run = plan.single_run(plan.consumer(self, policy, fetches=False), transaction, self.asynchronous)
        run_in_threads(self, run.wiring)
        return run.outcome

    def _check(self) -> None:
        super()._check()
        checks.check_consumer(self)


class AsyncConsumerMixin(AsyncTask):
    """Consumes in asyncio. The same methods as `ConsumerMixin`, awaited."""

    contract: Contract | None = None
    commit: Commit | None = None

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
        run = plan.single_run(plan.consumer(self, policy, fetches=False), transaction, self.asynchronous)
        await run_in_tasks(self, run.wiring)
        return run.outcome

    def _check(self) -> None:
        super()._check()
        checks.check_consumer(self)


class ConsumerTask(ConsumerMixin):
    """Base class of a task that consumes in threads."""


class AsyncConsumerTask(AsyncConsumerMixin):
    """Base class of a task that consumes in asyncio."""
