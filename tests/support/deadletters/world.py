"""Dead letters of both kinds on both databases behind plain calls, with consumers, and a clock that tests move."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.connectors import AsyncMemoryConnector, MemoryConnector
from onceward.deadletters import (
    AsyncDeadLetters,
    Burial,
    Category,
    DeadLetter,
    DeadLetters,
    Failure,
    Filter,
    Rca,
)
from onceward.deadletters.source import AsyncWithDeadLetters, WithDeadLetters
from onceward.inbox import AsyncInbox, Contract, Inbox
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.task.report import Report
from onceward.testing.clock import FakeClock
from onceward.transaction import Settlement, Verdict
from tests.support.world import consuming

if TYPE_CHECKING:
    from tests.support.databases import Database

FIXED = Rca(category="infrastructure", root_cause="the ledger was down", fix_ref="v1.2.3")
BILLING = Filter(consumer="billing", event_type="order.paid")
START = 1_700_000_000.0
LEASE = 30.0


def burial(message_id: str = "m1", **more: Any) -> Burial:
    values: dict[str, Any] = {
        "consumer": "billing",
        "message_id": message_id,
        "origin": "a test",
        "body": json.dumps(f"body of {message_id}").encode(),
        "category": Category.INFRASTRUCTURE,
        "reason": "failed",
        "error": "no connection",
        "event_type": "order.paid",
        "history": (Failure("2026-01-01T00:00:00+00:00", "no connection", 1, "SYSTEM"),),
    }
    return Burial(**{**values, **more})


def contract(**more: Any) -> Contract:
    values: dict[str, Any] = {
        "consumer_id": "billing",
        "event_types": ["order.paid"],
        "owner_team": "payments",
        "idempotency_mechanism": "dedup row and bill in one transaction",
    }
    return Contract(**{**values, **more})


def order(id_: str, payload: Any = None, **metadata: Any) -> Transaction:
    return Transaction(
        id=id_,
        payload={"amount": 7} if payload is None else payload,
        metadata={"event_type": "order.paid", **metadata},
    )


class Redelivered(NamedTuple):
    """A redriven letter in flight."""

    id: int
    token: int
    transaction: Transaction

    @property
    def message_id(self) -> str:
        return self.transaction.id


class Letters:
    """`DeadLetters` or `AsyncDeadLetters` behind plain calls."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = FakeClock(START)
        if not database.is_sqlite:
            database.do(
                "CREATE TABLE virtual_clock (at double precision)",
                f"INSERT INTO virtual_clock VALUES ({START})",
            )
        self.again()
        self.migrate()

    def again(self) -> Letters:
        """As after a restart: only the database remembers."""
        kind: Any = AsyncDeadLetters if self.database.asynchronous else DeadLetters
        self.made = kind(self.database.default, clock=self.clock)
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.run(getattr(self.made, name)(*args, **kwargs))

    def run(self, result: Any) -> Any:
        return self.database.run(result) if inspect.isawaitable(result) else result

    def core(self, name: str, *args: Any) -> Any:
        coroutine = getattr(self.made.operations, name)(*args)
        if self.database.asynchronous:
            return self.database.run(coroutine)
        from onceward._sync import run_blocking

        return run_blocking(coroutine)

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if not self.database.is_sqlite:
            self.database.do(f"UPDATE virtual_clock SET at = {self.clock()!r}")

    # ── shorthands ──────────────────────────────────────────────────────────────────────────────────────

    def one(self, **wanted: Any) -> DeadLetter:
        (letter,) = self.find(Filter(**wanted))
        return letter  # type: ignore[no-any-return]

    def send_again(self, wanted: Filter = BILLING, **more: Any) -> Any:
        return self.redrive(wanted, **{"rca": FIXED, "operator": "ann", **more})

    def deliver(self, size: int = 100, consumer: str = "billing", lease: float = LEASE) -> list[Redelivered]:
        return [
            Redelivered(*held, transaction)
            for held, _, transaction in self.core("deliver", consumer, size, lease)
        ]

    def settle(
        self,
        redelivered: Redelivered,
        how: str,
        *,
        error: str = "",
        category: str = "SYSTEM",
        delay: float = 0.0,
    ) -> bool:
        """Whether its lease was still valid."""
        failure = TransactionException(error, ExceptionCategory(category)) if how == "failed" else None
        settlement = Settlement(redelivered.transaction, Verdict(how), failure, delay)
        return not self.core("settle", "billing", [((redelivered.id, redelivered.token), settlement)])

    def rows(self, sql: str) -> list[dict[str, Any]]:
        with self.database.session() as session:
            return session.fetch_all(sql)  # type: ignore[no-any-return]

    # ── consumers ───────────────────────────────────────────────────────────────────────────────────────

    def queue(self, **settings: Any) -> Any:
        kind: Any = AsyncMemoryConnector if self.database.asynchronous else MemoryConnector
        return kind(clock=self.clock, **settings)

    def around(self, source: Any, consumer: str = "billing") -> Any:
        kind: Any = AsyncWithDeadLetters if self.database.asynchronous else WithDeadLetters
        return kind(source, self.made, consumer=consumer)

    def inbox(self, *contracts: Contract) -> Any:
        made: Any = (AsyncInbox if self.database.asynchronous else Inbox)(self.database.default)
        for each in contracts:
            self.run(made.register(each))
        return made

    def dispatch(self, source: Any, *transactions: Transaction) -> None:
        name = "dispatch_transactions"
        self.run(getattr(source, f"{name}_async" if self.database.asynchronous else name)(transactions))

    def consume(
        self,
        source: Any,
        handle: Callable[..., Any],
        *,
        inbox: Any = None,
        promised: Any = None,
        **policy: Any,
    ) -> Report:
        """Consume until the source is empty. `handle(transaction[, session])` is a plain function; in asyncio, it
        returns what the session's methods return, which is awaited."""
        base: Any = AsyncConsumerTask if self.database.asynchronous else ConsumerTask
        if self.database.asynchronous:

            async def process(task: Any, *args: Any) -> Any:
                result = handle(*args)
                return await result if inspect.isawaitable(result) else result
        else:

            def process(task: Any, *args: Any) -> Any:  # type: ignore[misc]
                return handle(*args)

        members = {"process_transaction": process} | ({"contract": promised} if promised is not None else {})
        task = type("Billing", (base,), members)(
            {"source": source}, {} if inbox is None else {"inbox": inbox}
        )
        report = self.run(task.consume_transactions(consuming(**policy)))
        assert isinstance(report, Report)
        return report
