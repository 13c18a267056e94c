"""Handlers that catch one kind of error, by its class, its text or its SQLSTATE, and return."""

from __future__ import annotations

import asyncio
import smtplib
import sqlite3
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from onceward import AsyncConsumerTask, ConsumerTask, Contract, Onceward, Transaction
from onceward.inbox import EffectRefused
from onceward.verify import ScenarioStatus, examine_consumer
from onceward.verify.watch.silence import silence_of
from tests.verification.consumers import EVENTS, INSERT, contract, setup, values

SWALLOWED = "an exception instead of write 1"


class Catches(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("SAVEPOINT before")
        try:
            session.execute(INSERT, values(transaction))
        except Exception as error:
            session.execute("ROLLBACK TO before")
            if not self.drops(error):
                raise

    def drops(self, error: Any) -> bool:
        return False


class DropsDeadlocks(Catches):
    def drops(self, error: Any) -> bool:
        return "deadlock" in str(error).lower()


class DropsWhenTheDiskIsFull(Catches):
    def drops(self, error: Any) -> bool:
        return "disk is full" in str(error)


class DropsTimeouts(Catches):
    def drops(self, error: Any) -> bool:
        return "statement timeout" in str(error)


class DropsWhatIsLocked(Catches):
    """As after SELECT … FOR UPDATE NOWAIT."""

    def drops(self, error: Any) -> bool:
        return "could not obtain lock on row" in str(error)


class DropsWhenThereIsNoSpace(Catches):
    def drops(self, error: Any) -> bool:
        return "No space left on device" in str(error)


class KnowsItsOwnErrors(Catches):
    def drops(self, error: Any) -> bool:
        return "UNIQUE constraint" in str(error) or "duplicate key" in str(error)


class DropsWhatIsSlow(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        try:
            async with asyncio.timeout(5):
                await session.execute(INSERT, values(transaction))
        except TimeoutError:
            return


@pytest.mark.req("CC-190")
@pytest.mark.parametrize(
    ("consumer", "found"),
    [
        (DropsDeadlocks, True),
        (DropsWhenTheDiskIsFull, True),
        (DropsTimeouts, True),
        (DropsWhatIsLocked, True),
        (DropsWhenThereIsNoSpace, True),
        (DropsWhatIsSlow, True),
        (KnowsItsOwnErrors, False),
    ],
)
def test_a_handler_that_drops_its_event_because_of_one_kind_of_error_is_found(
    consumer: Any, found: bool
) -> None:
    report = examine_consumer(consumer, EVENTS, setup=setup, only=["exceptions"])
    result = report["exceptions"]
    assert result.result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED), str(result)
    assert (SWALLOWED in str(result)) is found


class DropsWhatItCannotRead(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        if self.read(session, "SELECT count(*) AS bills FROM bills") is None:
            return
        if self.read(session, "SELECT count(*) AS marks FROM marks") is None:
            return
        session.execute(INSERT, values(transaction))

    def read(self, session: Any, query: str) -> Any:
        try:
            return session.fetch_one(query)
        except Exception:
            return None


class RaisesWhatItCannotRead(DropsWhatItCannotRead):
    def read(self, session: Any, query: str) -> Any:
        return session.fetch_one(query)


@pytest.mark.req("CC-195")
@pytest.mark.parametrize(
    ("consumer", "found"), [(DropsWhatItCannotRead, True), (RaisesWhatItCannotRead, False)]
)
def test_a_handler_that_drops_its_event_because_it_cannot_read_is_found(consumer: Any, found: bool) -> None:
    result = examine_consumer(consumer, EVENTS, setup=setup, only=["exceptions"])["exceptions"]
    assert result.result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED), str(result)
    for number in (1, 2):
        words = f"an exception instead of query {number} of event 'order-1' was swallowed"
        assert (words in str(result)) is found


class DropsBySqlstate(Catches):
    def drops(self, error: Any) -> bool:
        return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in {"40P01"}


class DropsByClass(Catches):
    def drops(self, error: Any) -> bool:
        return isinstance(getattr(error, "orig", None), psycopg.errors.LockNotAvailable)


class RaisesThem(Catches): ...


@pytest.mark.req("CC-190")
@pytest.mark.parametrize(
    ("consumer", "state"), [(DropsBySqlstate, "40P01"), (DropsByClass, "55P03"), (RaisesThem, "")]
)
def test_a_handler_that_drops_its_event_because_of_an_sqlstate_is_found(
    consumer: Any, state: str, postgres_url: str
) -> None:
    report = examine_consumer(consumer, EVENTS[:1], setup=setup, database=postgres_url, only=["exceptions"])
    result = report["exceptions"]
    assert result.result is (ScenarioStatus.FAILED if state else ScenarioStatus.PASSED), str(result)
    assert not state or f"{SWALLOWED}, with SQLSTATE {state}" in str(result)


class DropsByCode(Catches):
    def drops(self, error: Any) -> bool:
        code = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0)
        return bool(code & 0xFF == sqlite3.SQLITE_FULL)


class DropsByName(Catches):
    def drops(self, error: Any) -> bool:
        return getattr(getattr(error, "orig", None), "sqlite_errorname", "") == "SQLITE_IOERR_WRITE"


names = Onceward("names", database="sqlite:///names.db")


@names.consumer("memory://orders", contract=contract())
def drops_by_the_drivers_own_error(order: dict[str, int], db: sqlite3.Connection) -> None:
    try:
        db.execute("INSERT INTO bills (total) VALUES (?)", [order["total"]])
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise


@pytest.mark.req("CC-190")
@pytest.mark.parametrize(
    ("consumer", "code"),
    [
        (DropsByCode, "SQLITE_FULL"),
        (DropsByName, "SQLITE_IOERR_WRITE"),
        (drops_by_the_drivers_own_error, "SQLITE_BUSY"),
        (RaisesThem, ""),
    ],
)
def test_a_handler_that_drops_its_event_because_of_a_code_of_sqlite_is_found(
    consumer: Any, code: str
) -> None:
    report = examine_consumer(consumer, EVENTS[:1], setup=setup, only=["exceptions"])
    result = report["exceptions"]
    assert result.result is (ScenarioStatus.FAILED if code else ScenarioStatus.PASSED), str(result)
    assert not code or f"{SWALLOWED}, with {code}" in str(result)


# ── a provider that does not answer ─────────────────────────────────────────────────────────────────────


class CardsError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class Cards:
    class GatewayTimeout(CardsError): ...

    class Declined(CardsError): ...

    def charge(self, total: int, key: str) -> str:
        return f"paid {key}"


class Charges(ConsumerTask):
    contract = Contract(
        consumer_id="charges",
        event_types=["*"],
        owner_team="payments",
        idempotency_mechanism="the provider's key",
        mode="effectful",
    )
    caught: type[Exception] = Cards.Declined

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        def charge(key: str) -> str:
            try:
                paid: str = self.services["cards"].charge(5, key=key)
            except self.caught as error:
                return self.answer(error)
            return paid

        session.effect("charge", charge)
        session.execute(INSERT, values(transaction))

    def answer(self, error: Exception) -> str:
        raise EffectRefused("declined") from error


class TakesItsTimeoutForAnAnswer(Charges):
    caught = Cards.GatewayTimeout

    def answer(self, error: Exception) -> str:
        return "paid"


class TakesEveryErrorForARefusal(Charges):
    caught = CardsError


@pytest.mark.req("CC-191")
@pytest.mark.parametrize(
    ("consumer", "words"),
    [
        (TakesItsTimeoutForAnAnswer, "returned after a TimeoutError"),
        (TakesEveryErrorForARefusal, "raised EffectRefused after a TimeoutError"),
        (Charges, ""),
    ],
)
def test_a_lost_answer_comes_as_an_error_of_the_client(consumer: Any, words: str) -> None:
    report = examine_consumer(
        consumer, EVENTS, setup=setup, services={"cards": Cards()}, outside=["cards"], only=["exceptions"]
    )
    result = report["exceptions"]
    assert result.result is (ScenarioStatus.FAILED if words else ScenarioStatus.PASSED), str(result)
    assert words in str(result)


@pytest.mark.req("CC-191")
def test_the_error_of_a_lost_answer_is_one_of_every_library_that_is_loaded() -> None:
    import httpx
    import requests

    error: Any = silence_of(Cards().charge, "cards.charge did not answer")
    for kind in (
        TimeoutError,
        ConnectionError,
        httpx.TimeoutException,
        requests.Timeout,
        smtplib.SMTPServerDisconnected,
        Cards.GatewayTimeout,
    ):
        assert isinstance(error, kind), kind
    assert not isinstance(error, Cards.Declined)
    assert str(error) == "cards.charge did not answer"
