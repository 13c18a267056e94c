"""onceward: a PostgreSQL queue, with the record, the effect and the removal of each message in one commit."""

from __future__ import annotations

import time

from sqlalchemy import Engine, text

from onceward import ConsumerTask, Transaction
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.inbox import Contract, Inbox, InboxSession
from onceward.task.mixins.policies import ConsumerPolicy

ORDER = text("INSERT INTO orders VALUES (:id, :total)")


class PeerOrders(ConsumerTask):
    contract = Contract(
        consumer_id="orders", event_types=["*"], owner_team="bench", idempotency_mechanism="inbox"
    )

    def process_transaction(self, transaction: Transaction, session: InboxSession) -> None:
        session.execute(ORDER, {"id": transaction.id, "total": transaction.payload["total"]})


def consume(engine: Engine, url: str, count: int, concurrency: int) -> float:
    """Messages a second."""
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(PeerOrders.contract)
    loop = {"batch": {"size": 100}, "mode": "continuous", "concurrency": {"value": concurrency}}
    with PostgreSqlConnector(url, "orders") as queue:
        queue.dispatch_transactions([Transaction(f"order-{n}", {"total": n}) for n in range(count)])
        began = time.perf_counter()
        report = PeerOrders({"source": queue}, {"inbox": inbox}).consume_transactions(
            ConsumerPolicy.model_validate({"loop": loop})
        )
        took = time.perf_counter() - began
    assert report.succeeded == count
    return count / took
