"""A full disk still accepts what needs no space: the database answers, but no event can be done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event

from onceward import ConsumerTask, Transaction
from onceward.connectors import MemoryConnector
from onceward.inbox import DatabaseUnavailableError, Inbox
from onceward.task.exceptions import FetchException
from onceward.testing.inbox.samples import contract
from tests.support.world import consuming

pytestmark = pytest.mark.timeout(120)


class Disk:
    """Limits the space to what is used now, or removes the limit."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pages: int | None = None
        event.listen(engine, "checkout", self._limit)

    def _limit(self, connection: Any, *_: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {self.pages or 1 << 30}").close()

    def fill(self) -> None:
        with self.engine.connect() as connection:
            self.pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    engine = create_engine(f"sqlite:///{tmp_path}/inbox.db")
    yield Disk(engine)
    engine.dispose()


class Billing(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None: ...


def test_a_disk_that_is_full_ends_the_fetching_and_spends_nothing(disk: Disk) -> None:
    inbox = Inbox(disk.engine)
    inbox.migrate()
    inbox.register(Billing.contract)
    queue = MemoryConnector(max_deliveries=2)
    metadata = {"event_type": "order.paid"}
    events = [Transaction(id=f"{number:04}" + "x" * 390, metadata=metadata) for number in range(200)]
    queue.dispatch_transactions(events)
    disk.fill()
    task = Billing(connectors={"source": queue}, services={"inbox": inbox})

    for _ in range(3):
        with pytest.raises(FetchException) as raised:
            task.consume_transactions(consuming(streaming=True, batch=100))
        assert isinstance(raised.value.__cause__, DatabaseUnavailableError)
        assert raised.value.report is not None
        assert raised.value.report.failed == 0
        assert raised.value.report.fetches < 20

    disk.pages = None
    while queue.counts()["ready"] + queue.counts()["delayed"] + queue.counts()["leased"]:
        task.consume_transactions(consuming(batch=100))
    assert queue.counts()["dead"] == 0
