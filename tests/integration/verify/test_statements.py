"""Statements that fail, and what a handler makes of it: functions of the database that write, and locks."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import DBAPIError

from onceward import ConsumerTask, Transaction
from onceward.db import LockTimeoutError
from onceward.failures import RetryLater
from onceward.verify import ScenarioStatus, VerificationReport, examine_consumer
from tests.verification.consumers import EVENTS, INSERT, contract, setup, values

ADD = "SELECT add_bill(:id, :total) AS done"


def with_function(engine: Engine) -> None:
    setup(engine)
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION add_bill(id TEXT, total INTEGER) RETURNS TEXT LANGUAGE sql AS "
                "'INSERT INTO bills VALUES (id, total) RETURNING id'"
            )
        )
        connection.execute(
            text(
                "CREATE FUNCTION tax() RETURNS INTEGER LANGUAGE sql AS 'SELECT count(*)::INTEGER FROM marks'"
            )
        )


class CallsFunction(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("INSERT INTO marks VALUES (:id)", {"id": transaction.id})
        session.fetch_one(ADD, values(transaction))


class SwallowsFunction(CallsFunction):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("INSERT INTO marks VALUES (:id)", {"id": transaction.id})
        session.execute("SAVEPOINT before")
        try:
            session.fetch_one(ADD, values(transaction))
        except DBAPIError:
            session.execute("ROLLBACK TO before")


class SwallowsItInSqlalchemy(CallsFunction):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("INSERT INTO marks VALUES (:id)", {"id": transaction.id})
        session.execute("SAVEPOINT before")
        try:
            session.fetch_one(select(func.add_bill(*values(transaction).values()).label("done")))
        except DBAPIError:
            session.execute("ROLLBACK TO before")


class OnlyReads(ConsumerTask):
    contract = contract(no_effects=["order"])

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.fetch_one("SELECT tax() AS tax")
        session.fetch_one("WITH first AS (SELECT 1 AS x) SELECT x FROM first")


class WaitsForLock(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        if self.lock(session):
            session.execute(INSERT, values(transaction))

    def lock(self, session: Any) -> bool:
        session.advisory_lock("bills")
        return True


class GivesUp(WaitsForLock):
    def lock(self, session: Any) -> bool:
        try:
            session.advisory_lock("bills", timeout=0.05)
        except LockTimeoutError:
            return False
        return True


class GivesUpItsStatement(WaitsForLock):
    def lock(self, session: Any) -> bool:
        session.execute("SAVEPOINT before")
        session.execute("SET LOCAL lock_timeout = '50ms'")
        try:
            session.fetch_all("SELECT id FROM marks FOR UPDATE")
        except DBAPIError:
            session.execute("ROLLBACK TO before")
            return False
        return True


class ComesBackLater(WaitsForLock):
    def lock(self, session: Any) -> bool:
        try:
            session.advisory_lock("bills", timeout=0.05)
        except LockTimeoutError:
            raise RetryLater(after=0.01) from None
        return True


class TriesAgain(WaitsForLock):
    def lock(self, session: Any) -> bool:
        for _ in range(2):
            try:
                session.advisory_lock("bills", timeout=0.05)
            except LockTimeoutError:
                continue
            return True
        raise RuntimeError("locked")


class TriesAgainAndGivesUp(WaitsForLock):
    def lock(self, session: Any) -> bool:
        for _ in range(2):
            try:
                session.advisory_lock("bills", timeout=0.05)
            except LockTimeoutError:
                continue
            return True
        return False


class ComesBackAfterAFailure(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        try:
            session.execute(INSERT, values(transaction))
        except DBAPIError:
            raise RetryLater(after=0.01) from None


def examine(consumer: Any, database: str | None, *only: str) -> VerificationReport:
    return examine_consumer(
        consumer, EVENTS[:1], setup=with_function if database else setup, database=database, only=only
    )


@pytest.mark.usual("SwallowsFunction")
@pytest.mark.req("CC-158")
@pytest.mark.parametrize("consumer", [SwallowsFunction, SwallowsItInSqlalchemy])
def test_a_failed_function_of_the_database_that_a_handler_swallows_is_found(
    consumer: Any, postgres_url: str
) -> None:
    result = examine(consumer, postgres_url, "exceptions")["exceptions"]
    assert result.result is ScenarioStatus.FAILED
    assert "an exception instead of write 2 of event 'order-1' was swallowed" in str(result)


@pytest.mark.req("CC-158")
def test_a_handler_that_lets_it_propagate_passes(postgres_url: str) -> None:
    report = examine(CallsFunction, postgres_url, "every-type", "exceptions")
    assert report.passed, str(report)


@pytest.mark.req("CC-061")
def test_a_query_is_no_write_whatever_it_calls(postgres_url: str) -> None:
    report = examine(OnlyReads, postgres_url, "every-type", "exceptions")
    assert report.passed, str(report)


@pytest.mark.usual("GivesUp")
@pytest.mark.req("CC-159")
@pytest.mark.parametrize("consumer", [GivesUp, GivesUpItsStatement, TriesAgainAndGivesUp])
def test_a_handler_that_drops_its_event_because_a_lock_is_taken_is_found(
    consumer: Any, postgres_url: str
) -> None:
    result = examine(consumer, postgres_url, "exceptions")["exceptions"]
    assert result.result is ScenarioStatus.FAILED
    assert "an exception instead of lock 1" in str(result)
    assert "was swallowed" in str(result)


@pytest.mark.usual("ComesBackLater")
@pytest.mark.req("CC-159")
@pytest.mark.parametrize("consumer", [WaitsForLock, ComesBackLater, TriesAgain])
def test_one_that_fails_comes_back_or_tries_again_passes(consumer: Any, postgres_url: str) -> None:
    report = examine(consumer, postgres_url, "exceptions")
    assert report.passed, str(report)


@pytest.mark.req("CC-159")
def test_on_sqlite_no_lock_is_waited_for_in_a_handler() -> None:
    report = examine(GivesUp, None, "exceptions")
    assert report.passed, str(report)


@pytest.mark.req("CC-160")
def test_a_handler_may_answer_a_failure_with_retry_later() -> None:
    report = examine(ComesBackAfterAFailure, None, "exceptions")
    assert report.passed, str(report)
