"""The database of an inbox, deleted while a handler runs: nothing is acknowledged, and no attempt has failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.connectors import AsyncMemoryConnector, MemoryConnector
from onceward.inbox import AsyncInbox, DatabaseUnavailableError, Inbox
from onceward.task.exceptions import FetchException
from onceward.testing.inbox.samples import contract
from tests.support.world import consuming

EVENT = Transaction("event", metadata={"event_type": "order.paid"})
MODES = pytest.mark.parametrize("mode", ["transactional", "effectful"])


class Billing(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        file: Path = self.services["file"]
        file.rename(file.with_name("away.db"))


class AsyncBilling(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:
        file: Path = self.services["file"]
        file.rename(file.with_name("away.db"))


def check(error: FetchException, counts: dict[str, int]) -> None:
    assert isinstance(error.__cause__, DatabaseUnavailableError)
    assert "inbox.db was deleted or moved while it was open" in str(error)
    assert error.report is not None
    assert (error.report.succeeded, error.report.failed) == (0, 0)
    assert counts["delayed"] + counts["ready"] == 1


@pytest.mark.req("RN-08")
@MODES
def test_an_event_whose_database_is_lost_is_not_acknowledged(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Billing, "contract", contract(mode=mode))
    engine = create_engine(f"sqlite:///{tmp_path}/inbox.db")
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(Billing.contract)
    queue = MemoryConnector(on_failure="dead_letter")
    queue.dispatch_transactions([EVENT])
    services = {"inbox": inbox, "file": tmp_path / "inbox.db"}
    task = Billing(connectors={"source": queue}, services=services)
    with pytest.raises(FetchException) as raised:
        task.consume_transactions(consuming(streaming=True))
    check(raised.value, queue.counts())
    engine.dispose()


@pytest.mark.req("RN-08")
@MODES
def test_an_event_whose_database_is_lost_is_not_acknowledged_in_asyncio(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncBilling, "contract", contract(mode=mode))

    async def body() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/inbox.db")
        inbox = AsyncInbox(engine)
        await inbox.migrate()
        await inbox.register(AsyncBilling.contract)
        queue = AsyncMemoryConnector(on_failure="dead_letter")
        await queue.dispatch_transactions_async([EVENT])
        services = {"inbox": inbox, "file": tmp_path / "inbox.db"}
        task = AsyncBilling(connectors={"source": queue}, services=services)
        with pytest.raises(FetchException) as raised:
            await task.consume_transactions(consuming(streaming=True))
        check(raised.value, await queue.counts_async())
        await engine.dispose()

    asyncio.run(body())
