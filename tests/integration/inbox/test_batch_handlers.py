"""Batch handlers: one call and one commit for the events that wait, and only the bad one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from onceward import Onceward, Transaction
from onceward.app.build import open_task, open_task_async
from onceward.connectors import SqliteConnector
from onceward.errors import ConfigurationError
from onceward.middleware import Middleware
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.testing.inbox.effects import effectful
from onceward.testing.inbox.samples import contract
from tests.integration.inbox.test_engine import paid
from tests.support.schema import new_schema

POLICY = {"loop": {"batch": {"size": 4}, "concurrency": {"value": 1}}}
INSERT = "INSERT INTO charged VALUES (:id)"


class Order(msgspec.Struct):
    amount: int


class Shop:
    """A batch handler that notes its calls and fails for some ids."""

    def __init__(
        self, directory: Path, database: str, *, asynchronous: bool, queue: str | None = None
    ) -> None:
        self.app = Onceward("shop", database=database)
        self.path = directory / ("shop.db" if queue else "queue.db")
        self.calls: list[list[int]] = []
        self.bad: set[int] = set()
        self.queue = queue
        source = f"sqlite:///{self.path}{f'?queue={queue}' if queue else ''}"

        def note(orders: list[Order]) -> None:
            amounts = [each.amount for each in orders]
            self.calls.append(amounts)

        def check(orders: list[Order]) -> None:
            if self.bad & {each.amount for each in orders}:
                raise TransactionException("no", category=ExceptionCategory.BUSINESS)

        if asynchronous:

            @self.app.consumer(source, contract=contract(), policy=POLICY, name="charge")
            async def charge_async(orders: list[Order], session: Any) -> None:
                note(orders)
                await session.execute(INSERT, [{"id": f"t{each.amount}"} for each in orders])
                check(orders)

        else:

            @self.app.consumer(source, contract=contract(), policy=POLICY, name="charge")
            def charge(orders: list[Order], session: Any) -> None:
                note(orders)
                session.execute(INSERT, [{"id": f"t{each.amount}"} for each in orders])
                check(orders)

        self.engine = self.app.create_engine()
        with self.engine.begin() as connection:
            connection.execute(text("DROP TABLE IF EXISTS charged"))
            connection.execute(text("CREATE TABLE charged (id TEXT)"))

    def put(self, *numbers: int) -> None:
        with SqliteConnector(self.path, queue=self.queue) as queue:
            queue.dispatch_transactions([paid(f"t{n}", {"amount": n}) for n in numbers])

    def consume(self) -> Any:
        consumer = self.app.consumers["charge"]
        if consumer.asynchronous:

            async def consume() -> Any:
                async with open_task_async(self.app, consumer) as task:
                    return await task.consume_transactions(consumer.policy)

            return asyncio.run(consume())
        with open_task(self.app, consumer) as task:
            return task.consume_transactions(consumer.policy)

    def charged(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.scalars(text("SELECT id FROM charged")))

    def dedup_rows(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.scalar(text("SELECT count(*) FROM onceward_dedup")) or 0)


@pytest.fixture(params=["sqlite, threads", "postgresql, asyncio", "sqlite, one commit"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    if request.param.startswith("postgresql"):
        with new_schema(request.getfixturevalue("postgres_url")) as schema:
            made = Shop(tmp_path, schema.plain_url, asynchronous=True)
            yield made
            made.engine.dispose()
    else:
        queue = "orders" if request.param.endswith("one commit") else None
        made = Shop(tmp_path, f"sqlite:///{tmp_path / 'shop.db'}", asynchronous=False, queue=queue)
        yield made
        made.engine.dispose()


@pytest.mark.req("BH-01")
def test_events_that_wait_are_one_call_and_duplicates_are_left_out(shop: Shop) -> None:
    shop.put(*range(6))
    assert shop.consume().succeeded == 6
    first, *others = shop.calls
    assert first == [0, 1, 2, 3]
    assert [each for call in others for each in call] == [4, 5], (
        "a free worker may take the first of them alone"
    )
    assert shop.charged() == [f"t{n}" for n in range(6)]
    assert shop.dedup_rows() == 6
    shop.calls.clear()
    shop.put(1, 6, 2, 7)
    report = shop.consume()
    assert (report.succeeded, report.duplicates) == (4, 2)
    assert shop.calls == [[6, 7]]
    assert shop.charged() == [f"t{n}" for n in range(8)]


@pytest.mark.req("BH-02")
def test_a_batch_that_fails_is_halved_until_the_bad_event_is_alone(shop: Shop) -> None:
    shop.bad = {2}
    shop.put(*range(4))
    report = shop.consume()
    assert (report.succeeded, report.failed) == (3, 1)
    assert shop.calls == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]
    assert shop.charged() == ["t0", "t1", "t3"]
    assert shop.dedup_rows() == 3
    with shop.engine.connect() as connection:
        letters = connection.execute(text("SELECT tracking_id FROM onceward_dead_letters")).scalars().all()
    assert letters == ["t2"]


@pytest.mark.req("BH-03")
@pytest.mark.parametrize("of", [dict, dict[str, Any], Transaction, Order])
def test_a_batch_is_a_list_of_what_its_annotation_says(of: Any, tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path / 'shop.db'}")
    given: list[Any] = []

    def charge(orders: Any, session: Any) -> None:
        given.extend(orders)

    charge.__annotations__["orders"] = list[of]
    app.consumer(f"sqlite:///{tmp_path / 'queue.db'}", contract=contract(), policy=POLICY)(charge)
    with SqliteConnector(tmp_path / "queue.db") as queue:
        queue.dispatch_transactions([paid("t1", {"amount": 1}), paid("t2", {"amount": 2})])
    with open_task(app, app.consumers["charge"]) as task:
        assert task.consume_transactions(app.consumers["charge"].policy).succeeded == 2
    kind = Transaction if of is Transaction else Order if of is Order else dict
    assert [type(each) for each in given] == [kind, kind]


@pytest.mark.req("BH-04")
@pytest.mark.parametrize(
    ("promised", "options", "remedy"),
    [(effectful(), {}, "Take one event"), (contract(), {"commit": "group"}, "leave commit='group' out")],
)
def test_what_cannot_work_is_refused_where_it_is_written(
    promised: Any, options: dict[str, Any], remedy: str
) -> None:
    app = Onceward("shop", database="sqlite://")
    with pytest.raises(ConfigurationError, match=remedy):

        @app.consumer("memory://orders", contract=promised, **options)
        def charge(orders: list[Order], session: Any) -> None: ...


class Around(Middleware):
    def wrap_step(self, step: Any, call: Any) -> Any:
        async def around(*arguments: Any) -> Any:
            return await call(*arguments)

        return around


@pytest.mark.req("BH-01")
def test_with_middleware_around_it_each_event_is_a_batch_of_its_own(tmp_path: Path) -> None:
    shop = Shop(tmp_path, f"sqlite:///{tmp_path / 'shop.db'}", asynchronous=False)
    shop.app.middleware = (Around(),)
    shop.put(1, 2)
    assert shop.consume().succeeded == 2
    assert shop.calls == [[1], [2]]
    shop.engine.dispose()
