"""Two different events at the same time: an update that one of them loses is found, where it can happen."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.inbox import Contract
from onceward.verify import ScenarioStatus, VerificationReport, examine_consumer
from tests.verification.consumers import contract

pytestmark = pytest.mark.req("CC-064")

EVENTS = [
    {"tracking_id": f"pay-{n}", "payload": {"account": account, "amount": n}, "event_type": "order"}
    for n, account in ((1, "a"), (2, "b"))
]
"""They share no row: the kit makes a second event with the same payload itself."""
READ = "SELECT balance FROM accounts WHERE id = :account"
WRITE = """INSERT INTO accounts (id, balance, version) VALUES (:account, :balance, 1)
    ON CONFLICT (id) DO UPDATE SET balance = excluded.balance"""


def setup(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE accounts (id TEXT PRIMARY KEY, balance INTEGER, version INTEGER)")
        )
        connection.execute(text("CREATE TABLE log (id TEXT)"))


def with_accounts(engine: Engine) -> None:
    setup(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO accounts VALUES ('a', 100, 1), ('b', 100, 1)"))


def examine(consumer: Any, database: Any, **given: Any) -> VerificationReport:
    given = {"events": EVENTS, "setup": setup, "only": ["lost-updates"], **given}
    return examine_consumer(consumer, database=database, **given)


def account(transaction: Transaction) -> dict[str, Any]:
    return {"account": transaction.payload["account"]}


def balance(transaction: Transaction, before: int | None) -> dict[str, Any]:
    return {**account(transaction), "balance": (before or 0) + transaction.payload["amount"]}


# ── wrong ───────────────────────────────────────────────────────────────────────────────────────────────


class ReadsAndWrites(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        before = session.execute_scalar(READ, account(transaction))
        session.execute(WRITE, balance(transaction, before))


class AsyncReadsAndWrites(AsyncConsumerTask):
    """Another write comes first."""

    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.execute("INSERT INTO log VALUES (:id)", {"id": transaction.id})
        before = await session.execute_scalar(READ, account(transaction))
        await session.execute(WRITE, balance(transaction, before))


in_memory = threading.Lock()


class LocksInMemory(ConsumerTask):
    """Its lock ends at the process, and before the commit."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        with in_memory:
            before = session.execute_scalar(READ, account(transaction))
            session.execute(WRITE, balance(transaction, before))


class Numbers(ConsumerTask):
    """Numbers its rows by counting them, in one operation on the connection."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        def number(own: Any) -> None:
            count = own.connection.execute(text("SELECT count(*) FROM log")).scalar_one()
            own.connection.execute(text("INSERT INTO log VALUES (:id)"), {"id": str(count + 1)})

        session.run(number)


class OpensAccounts(ConsumerTask):
    """The first event of an account inserts its row, and its key keeps the second from doing so; later ones have
    nothing to collide with."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        before = session.execute_scalar(READ, account(transaction))
        new = balance(transaction, before)
        if before is None:
            session.execute("INSERT INTO accounts VALUES (:account, :balance, 1)", new)
        else:
            session.execute("UPDATE accounts SET balance = :balance WHERE id = :account", new)


class OpensAccountsByOrder(OpensAccounts):
    """A second event with the same payload is refused, so only the samples can meet."""

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("INSERT INTO orders VALUES (:amount)", {"amount": transaction.payload["amount"]})
        super().process_transaction(transaction, session)


class MakesItsTable(ConsumerTask):
    """Two that create one table wait for each other; those that find it do not."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("CREATE TABLE IF NOT EXISTS numbers (n INTEGER)")
        count = session.execute_scalar("SELECT count(*) FROM numbers")
        session.execute("INSERT INTO numbers VALUES (:n)", {"n": count + 1})


class CallsInBetween(ConsumerTask):
    """The effect ends the transaction that read, on SQLite as well."""

    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        before = session.execute_scalar(READ, account(transaction))
        session.effect("charge", lambda key: None)
        session.execute(WRITE, balance(transaction, before))


class AsyncCallsInBetween(AsyncConsumerTask):
    contract = contract(mode="effectful")

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        before = await session.execute_scalar(READ, account(transaction))
        await session.effect("charge", charge)
        await session.execute(WRITE, balance(transaction, before))


async def charge(key: str) -> None: ...


@pytest.mark.usual("ReadsAndWrites", "AsyncReadsAndWrites")
@pytest.mark.parametrize("consumer", [ReadsAndWrites, AsyncReadsAndWrites, LocksInMemory])
def test_a_lost_update_is_found_on_postgresql(consumer: Any, postgres_url: str) -> None:
    (finding,) = examine(consumer, postgres_url)["lost-updates"].findings
    assert "events 'pay-1' and 'pay-1-like' at the same time leave rows that neither order" in finding.text
    assert "accounts: 1 row missing: {id: 'a', balance: 2, version: 1}" in finding.details
    assert "FOR UPDATE" in finding.text


def test_events_of_one_aggregate_are_tried_together(postgres_url: str) -> None:
    events = [{**each, "aggregate_id": "all"} for each in EVENTS]
    (finding,) = examine(Numbers, postgres_url, events=events)["lost-updates"].findings
    assert "events 'pay-1' and 'pay-2'" in finding.text
    assert "log: 1 row missing: {id: '2'}" in finding.details


@pytest.mark.usual("OpensAccounts")
@pytest.mark.parametrize(
    ("consumer", "lost"),
    [
        (OpensAccounts, "accounts: 1 row missing: {id: 'a', balance: 3"),
        (MakesItsTable, "numbers: 1 row missing"),
    ],
)
def test_a_lost_update_behind_the_first_event_is_found(consumer: Any, lost: str, postgres_url: str) -> None:
    (finding,) = examine(consumer, postgres_url, events=EVENTS[:1])["lost-updates"].findings
    assert "after event 'pay-1-like-like', events 'pay-1' and 'pay-1-like'" in finding.text
    assert finding.details[0].startswith(lost)


def test_samples_meet_after_a_third_one(postgres_url: str) -> None:
    def tables(engine: Engine) -> None:
        setup(engine)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY)"))

    events = [
        {**EVENTS[0], "tracking_id": f"pay-{n}", "payload": {"account": "a", "amount": n}} for n in (1, 2, 3)
    ]
    (finding,) = examine(OpensAccountsByOrder, postgres_url, setup=tables, events=events)[
        "lost-updates"
    ].findings
    assert "after event 'pay-3', events 'pay-1' and 'pay-2'" in finding.text


@pytest.mark.parametrize("consumer", [CallsInBetween, AsyncCallsInBetween])
def test_an_effect_between_reading_and_writing_loses_updates_on_sqlite_too(consumer: Any) -> None:
    (finding,) = examine(consumer, None)["lost-updates"].findings
    assert "accounts: 1 row missing: {id: 'a', balance: 2, version: 1}" in finding.details


# ── right ───────────────────────────────────────────────────────────────────────────────────────────────


class Locks(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        before = session.execute_scalar(f"{READ} FOR UPDATE", account(transaction))
        session.execute(WRITE, balance(transaction, before))


class AsyncLocksAName(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.advisory_lock(transaction.payload["account"])
        before = await session.execute_scalar(READ, account(transaction))
        await session.execute(WRITE, balance(transaction, before))


class Adds(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        added = WRITE.replace("= excluded.balance", "= accounts.balance + excluded.balance")
        session.execute(added, balance(transaction, 0))


class Compares(ConsumerTask):
    """The one that comes too late fails, and is delivered again."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        row = session.fetch_one("SELECT * FROM accounts WHERE id = :account", account(transaction))
        new = {"balance": row["balance"] + transaction.payload["amount"]}
        session.occ_update("accounts", {"id": row["id"]}, new, expected=row["version"])


class InsertsOnce(ConsumerTask):
    """The second event with the same payload fails in either order."""

    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(READ, account(transaction))
        session.execute("INSERT INTO accounts VALUES (:account, 1, 1)", account(transaction))


@pytest.mark.usual("Locks")
@pytest.mark.parametrize(
    ("consumer", "tables"),
    [
        (Locks, with_accounts),
        (AsyncLocksAName, setup),
        pytest.param(Adds, setup, marks=pytest.mark.long),
        pytest.param(Compares, with_accounts, marks=pytest.mark.long),
        (InsertsOnce, setup),
    ],
)
def test_a_consumer_that_loses_nothing_passes(consumer: Any, tables: Any, postgres_url: str) -> None:
    report = examine(consumer, postgres_url, setup=tables, events=EVENTS[:1])
    assert report["lost-updates"].result is ScenarioStatus.PASSED, str(report)


def test_the_isolation_of_a_given_engine_counts(postgres_url: str) -> None:
    engine = create_engine(postgres_url, isolation_level="SERIALIZABLE")
    report = examine(ReadsAndWrites, engine, events=EVENTS[:1])
    assert report["lost-updates"].result is ScenarioStatus.PASSED, str(report)
    assert report.evidence().isolation == "serializable"


def test_on_sqlite_a_transaction_is_alone() -> None:
    result = examine(ReadsAndWrites, None)["lost-updates"]
    assert result.result is ScenarioStatus.SKIPPED
    assert "SQLite runs one transaction after another" in result.note


def test_strict_order_is_no_obstacle(postgres_url: str) -> None:
    class InOrder(ReadsAndWrites):
        contract: Contract = contract(sequencing="strict")

    events = [{**each, "aggregate_id": "a", "sequence": n} for n, each in enumerate(EVENTS, 1)]
    report = examine(InOrder, postgres_url, events=events)
    assert report["lost-updates"].result is ScenarioStatus.PASSED, str(report)


# ── write skew ──────────────────────────────────────────────────────────────────────────────────────────


class LastCloses(ConsumerTask):
    """Each event empties an account, and the last one writes to the log. Two at once do not see each other."""

    contract = contract()
    locks = False

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        if self.locks:
            session.advisory_lock("accounts")
        session.execute("UPDATE accounts SET balance = 0 WHERE id = :account", account(transaction))
        if not session.execute_scalar("SELECT count(*) FROM accounts WHERE balance > 0"):
            session.execute("INSERT INTO log VALUES ('closed')")


class LastClosesInTurn(LastCloses):
    locks = True


@pytest.mark.req("CC-196")
@pytest.mark.parametrize(("consumer", "found"), [(LastCloses, True), (LastClosesInTurn, False)])
def test_events_that_do_not_see_what_the_other_wrote_are_found(
    consumer: Any, found: bool, postgres_url: str
) -> None:
    events = [
        {
            "tracking_id": f"order-{name}",
            "event_type": "order",
            "aggregate_id": "shop",
            "payload": {"account": name, "amount": 1},
        }
        for name in "ab"
    ]
    report = examine(consumer, postgres_url, events=events, setup=with_accounts)
    assert report.passed is not found, str(report)
    assert not found or "log: 1 row missing" in str(report)
