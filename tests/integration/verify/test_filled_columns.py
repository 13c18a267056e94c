"""Numbers and times that the database fills in are compared where something else gave them."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from sqlalchemy import Engine

from onceward import Contract, Transaction
from onceward.verify import ScenarioStatus, examine_consumer

CACHE: dict[str, Any] = {}
LOCAL = threading.local()


def contract() -> Contract:
    return Contract(
        consumer_id="shop", event_types=["*"], owner_team="x", idempotency_mechanism="one transaction"
    )


def setup(engine: Engine) -> None:
    number = "INTEGER PRIMARY KEY" if engine.dialect.name == "sqlite" else "SERIAL PRIMARY KEY"
    later = "datetime('now', '+3 days')" if engine.dialect.name == "sqlite" else "now() + interval '3 days'"
    with engine.begin() as connection:
        for statement in (
            f"CREATE TABLE accounts (id {number}, name TEXT, balance INTEGER, "
            f"until TIMESTAMP NOT NULL DEFAULT ({later}))",
            f"CREATE TABLE slots (id {number}, total INTEGER)",
            "INSERT INTO slots (total) VALUES (0), (0)",
            "CREATE TABLE bills (account INTEGER REFERENCES accounts (id), total INTEGER)",
            "INSERT INTO accounts (name, balance, until) VALUES ('ann', 0, '2026-01-01'), ('bob', 0, '2026-01-01')",
        ):
            connection.exec_driver_sql(statement)


def event(number: int, name: str, **more: Any) -> Transaction:
    return Transaction(id=f"o{number}", payload={"name": name, "total": 10 * number, **more})


EVENTS = [event(1, "ann", until="2026-02-01"), event(2, "bob", until="2026-03-01")]
TO_ANN = [event(1, "ann", until="2026-02-01"), event(2, "ann", until="2026-03-01")]


def add(session: Any, number: int, total: int) -> None:
    session.execute(
        "UPDATE accounts SET balance = balance + :total WHERE id = :id", {"total": total, "id": number}
    )


def swaps_accounts(event: Any, session: Any) -> None:
    first = hash(event.tracking_id) % 2 + 1
    add(session, first, 3)
    add(session, 3 - first, 7)


def bills_the_first(event: Any, session: Any) -> None:
    if "account" not in CACHE:
        CACHE["account"] = session.execute_scalar(
            "SELECT id FROM accounts WHERE name = :name", {"name": event.payload["name"]}
        )
    session.execute("INSERT INTO bills VALUES (:account, :total)", {**CACHE, "total": event.payload["total"]})


def pays_until(event: Any, session: Any) -> None:
    session.execute(
        "UPDATE accounts SET until = :until WHERE name = :name",
        {name: event.payload[name] for name in ("until", "name")},
    )


def remembers_by_thread(event: Any, session: Any) -> None:
    if getattr(LOCAL, "last", None) == event.tracking_id:
        return
    LOCAL.last = event.tracking_id
    session.execute("INSERT INTO bills VALUES (1, :total)", {"total": event.payload["total"]})


@pytest.mark.req("CC-165")
@pytest.mark.parametrize(
    ("handler", "events", "scenario", "said"),
    [
        (swaps_accounts, EVENTS[:1], "interpreters", "accounts by id"),
        (bills_the_first, EVENTS, "state", "bills.account → accounts"),
        (pays_until, TO_ANN, "order", "until: "),
    ],
)
def test_rows_of_the_setup_and_given_times_are_compared(
    handler: Any, events: list[Transaction], scenario: str, said: str
) -> None:
    CACHE.clear()
    report = examine_consumer(handler, contract=contract(), events=events, setup=setup, only=[scenario])
    assert report[scenario].result is ScenarioStatus.FAILED, str(report)
    assert said in str(report[scenario])


@pytest.mark.req("CC-165")
def test_on_postgresql(postgres_url: str) -> None:
    given: dict[str, Any] = {"contract": contract(), "setup": setup, "database": postgres_url}
    report = examine_consumer(pays_until, events=TO_ANN, only=["order"], **given)
    assert "until: " in str(report["order"]), str(report)
    report = examine_consumer(opens_an_account, events=EVENTS, only=["state", "interpreters"], **given)
    assert report.passed, str(report)


@pytest.mark.req("CC-166")
def test_state_of_a_thread_that_a_retry_in_place_meets_is_found() -> None:
    report = examine_consumer(
        remembers_by_thread, contract=contract(), events=EVENTS, setup=setup, only=["exceptions"]
    )
    assert report["exceptions"].result is ScenarioStatus.FAILED, str(report)
    assert "belongs to its thread, task or context" in str(report["exceptions"])


# ── what changes by itself ──────────────────────────────────────────────────────────────────────────────


def opens_an_account(event: Any, session: Any) -> None:
    """The database gives it a number and a time."""
    session.execute("INSERT INTO accounts (name, balance) VALUES (:name, 0)", {"name": event.tracking_id})


def asks_any_account(event: Any, session: Any) -> None:
    session.execute(
        "INSERT INTO bills VALUES (:account, :total)",
        {"account": random.choice((1, 2)), "total": event.payload["total"]},
    )


def replaces_the_last(event: Any, session: Any) -> None:
    """SQLite gives the number of a row that was deleted to the next one."""
    session.execute("DELETE FROM accounts WHERE name = :name", {"name": event.payload["name"]})
    opens_an_account(event, session)


def takes_the_first_free(event: Any, session: Any) -> None:
    session.execute(
        "UPDATE slots SET total = :total WHERE id = (SELECT min(id) FROM slots WHERE total = 0)",
        {"total": event.payload["total"]},
    )


@pytest.mark.req("CC-165")
@pytest.mark.parametrize(
    "handler", [opens_an_account, asks_any_account, replaces_the_last, takes_the_first_free]
)
def test_what_the_database_or_chance_decides_is_not(handler: Any) -> None:
    scenarios = ["state", "exceptions", "interpreters", "order"]
    report = examine_consumer(handler, contract=contract(), events=EVENTS, setup=setup, only=scenarios)
    assert report.passed, str(report)


# ── tables that are not the user's ──────────────────────────────────────────────────────────────────────


def with_an_index(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE VIRTUAL TABLE texts USING fts5(id, name)")


def indexes(event: Any, session: Any) -> None:
    session.execute("INSERT INTO texts VALUES (:id, :name)", {"id": event.tracking_id, **event.payload})


@pytest.mark.req("CC-165")
def test_how_sqlite_keeps_a_virtual_table_does_not_count() -> None:
    given: dict[str, Any] = {"contract": contract(), "setup": with_an_index, "only": ["order"]}
    assert (report := examine_consumer(indexes, events=EVENTS, **given)).passed, str(report)
