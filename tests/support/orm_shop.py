"""An app whose consumer writes through SQLAlchemy's ORM, on every database and in both modes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sqlalchemy import ForeignKey, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from onceward import Onceward, Transaction
from onceward.app.build import open_task, open_task_async
from onceward.inbox import AsyncInboxSession, Contract, InboxSession
from onceward.task.report import Report
from onceward.task.work import Outcome


class Base(DeclarativeBase): ...


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    orders: Mapped[list[Order]] = relationship(back_populates="customer")


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int]
    customer_id: Mapped[int] = mapped_column(ForeignKey("customers.id"))
    customer: Mapped[Customer] = relationship(back_populates="orders")


def contract(**more: Any) -> Contract:
    return Contract(
        **{
            "consumer_id": "orders",
            "event_types": ["*"],
            "owner_team": "shop",
            "idempotency_mechanism": "one transaction with the inbox",
            **more,
        }
    )


Body = Callable[[Any, Any, Any], Any]
"""What the handler does with the payload, the ORM session, and the inbox's session."""


class OrmShop:
    def __init__(self, url: str, *, asynchronous: bool) -> None:
        self.url = url
        self.asynchronous = asynchronous
        self.engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
        Base.metadata.create_all(self.engine)

    def app(self, body: Body, source: str = "memory://orders", **more: Any) -> Onceward:
        app = Onceward("shop", database=self.url)
        given = {
            "contract": contract(),
            "policy": {"steps": {"process": {"retry": {"max_attempts": 1}}}},
            **more,
        }
        if self.asynchronous:

            @app.consumer(source, name="take", **given)
            async def take_async(order: dict[str, Any], db: AsyncSession, session: AsyncInboxSession) -> Any:
                return await db.run_sync(lambda plain: body(order, plain, session))
        else:

            @app.consumer(source, name="take", **given)
            def take(order: dict[str, Any], db: Session, session: InboxSession) -> Any:
                return body(order, db, session)

        return app

    def process(self, app: Onceward, *transactions: Transaction) -> list[Outcome]:
        """Each alone."""
        return [
            self._in_task(app, lambda task, each=each: task.start_processing(each)) for each in transactions
        ]

    def consume(self, app: Onceward, *transactions: Transaction) -> Report:
        """All, from the queue, as the policy of the consumer says."""
        app.consumers["take"].send_many(transactions)
        report: Report = self._in_task(
            app, lambda task: task.consume_transactions(app.consumers["take"].policy)
        )
        return report

    def _in_task(self, app: Onceward, use: Callable[[Any], Any]) -> Any:
        if not self.asynchronous:
            with open_task(app, app.consumers["take"]) as task:
                return use(task)

        async def run() -> Any:
            async with open_task_async(app, app.consumers["take"]) as task:
                return await use(task)

        return asyncio.run(run())

    def rows(self, query: str = "SELECT id, total FROM orders ORDER BY id") -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]

    def done(self) -> int:
        """How many events have a record."""
        return int(self.rows("SELECT count(*) FROM onceward_dedup")[0][0])


def order(number: int, **payload: Any) -> Transaction:
    return Transaction(id=f"order-{number}", payload={"id": number, **payload})
