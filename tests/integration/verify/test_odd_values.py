"""Values that a driver cannot turn into Python's can be compared, too."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.verify import ScenarioStatus, examine_consumer
from tests.verification.consumers import EVENTS, contract

pytestmark = pytest.mark.req("CC-030")

POSTGRESQL = (
    "CREATE TABLE odd (id TEXT, ends DATE DEFAULT 'infinity', began TIMESTAMPTZ DEFAULT '0044-03-15 BC', "
    "closes TIME DEFAULT '24:00', during TSTZRANGE DEFAULT '[2020-01-01, infinity)', days DATE[] DEFAULT '{infinity}')"
)
SQLITE = "CREATE TABLE odd (id TEXT, name TEXT DEFAULT (CAST(x'636166e9' AS TEXT)), at INTEGER DEFAULT 5)"


class Writes(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute("INSERT INTO odd (id) VALUES (:id)", {"id": transaction.id})


class WritesInAsyncio(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.execute("INSERT INTO odd (id) VALUES (:id)", {"id": transaction.id})


class Swallows(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        try:
            session.execute("INSERT INTO odd (id) VALUES (:id)", {"id": transaction.id})
        except Exception:
            return


def examine(consumer: Any, url: str | None, table: str) -> Any:
    def setup(engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text(table))

    return examine_consumer(
        consumer, EVENTS[:2], setup=setup, database=url, only=["duplicates", "exceptions"]
    )


@pytest.mark.usual("WritesInAsyncio", "Swallows")
@pytest.mark.parametrize("consumer", [Writes, WritesInAsyncio, Swallows])
@pytest.mark.parametrize("name", ["sqlite", "postgresql"])
def test_they_are_compared(consumer: Any, name: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("postgres_url") if name == "postgresql" else None
    report = examine(consumer, url, POSTGRESQL if url else SQLITE)
    failed = {each.name for each in report.scenarios if each.result is ScenarioStatus.FAILED}
    assert failed == ({"exceptions"} if consumer is Swallows else set()), str(report)
    if consumer is Swallows:
        assert ("ends: 'infinity'" if url else "name: b'caf\\xe9'") in str(report)
