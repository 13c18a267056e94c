"""A queue in the application's database: a message leaves it in the transaction of its handler, or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, create_engine, event, text

from onceward import Onceward, Transaction
from onceward.app.build import open_task, open_task_async
from onceward.connectors.urls import Address
from onceward.inbox import AsyncInboxSession, Contract, InboxSession
from onceward.task.report import Report
from tests.support.schema import Schema, new_schema

WRITE = "INSERT INTO bookings (number) VALUES (:number)"
POLICY = {
    "loop": {"streaming": False, "batch": {"size": 50}, "concurrency": {"value": 4}},
    "steps": {"process": {"retry": {"max_attempts": 1}}},
}


class Booking(msgspec.Struct):
    number: int


class Shop:
    """An app with one consumer, whose queue is in its database."""

    def __init__(
        self, source: str, database: str, engine: Engine, *, asynchronous: bool, **contract: Any
    ) -> None:
        self.source = Address(source)
        self.app = Onceward("shop", database=database)
        self.engine = engine
        self.asynchronous = asynchronous
        self.meanwhile: Callable[[int], None] = lambda number: None
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE bookings (number INTEGER)"))
        settings: dict[str, Any] = {"contract": _contract(**contract), "policy": POLICY}

        if asynchronous:

            @self.app.consumer(source, **settings)
            async def book_async(booking: Booking, session: AsyncInboxSession) -> None:
                await session.execute(WRITE, {"number": booking.number})
                self.meanwhile(booking.number)

        else:

            @self.app.consumer(source, **settings)
            def book(booking: Booking, session: InboxSession) -> None:
                session.execute(WRITE, {"number": booking.number})
                self.meanwhile(booking.number)

        [self.consumer] = self.app.consumers.values()

    def send(self, *transactions: Transaction) -> None:
        with self.source.open(asynchronous=False) as queue:
            queue.dispatch_transactions(transactions)

    def drain(self) -> Report:
        if not self.asynchronous:
            with open_task(self.app, self.consumer) as task:
                return task.consume_transactions()

        async def drain() -> Report:
            async with open_task_async(self.app, self.consumer) as task:
                return await task.consume_transactions()

        return asyncio.run(drain())

    def bookings(self) -> list[int]:
        return self.ask("SELECT number FROM bookings ORDER BY number")

    def ask(self, query: str) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.scalars(text(query)))

    def do(self, statement: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement))

    def counts(self) -> dict[str, int]:
        with self.source.open(asynchronous=False) as queue:
            counts: dict[str, int] = queue.counts()
            return counts


def _contract(**more: Any) -> Contract:
    return Contract(
        consumer_id="billing",
        event_types=["*"],
        owner_team="shop",
        idempotency_mechanism="one transaction",
        **more,
    )


def order(number: int) -> Transaction:
    return Transaction(f"order-{number}", {"number": number})


def source_in(schema: Schema) -> str:
    server, _, options = schema.plain_url.partition("?")
    return f"{server}/orders?{options}"


@contextmanager
def on_postgresql(schema: Schema, database: str | None = None, **settings: Any) -> Iterator[Shop]:
    engine = create_engine(schema.url, connect_args=schema.connect_args)
    try:
        yield Shop(source_in(schema), database or schema.plain_url, engine, **settings)
    finally:
        engine.dispose()


@pytest.fixture
def schema(postgres_url: str) -> Iterator[Schema]:
    with new_schema(postgres_url) as made:
        yield made


@pytest.fixture(params=["threads", "asyncio"])
def shop(request: pytest.FixtureRequest, schema: Schema) -> Iterator[Shop]:
    with on_postgresql(schema, asynchronous=request.param == "asyncio") as made:
        yield made


class Ledger:
    """What all engines of this process did."""

    def __init__(self) -> None:
        self.commits = 0
        self.statements: Counter[str] = Counter()

    def commit(self, connection: Any) -> None:
        self.commits += 1

    def execute(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        self.statements["in its own transaction"] += statement.lstrip().startswith("DELETE FROM") and (
            "onceward_queue_messages" in statement
        )
        self.statements["in the handler's"] += "onceward_queue_done" in statement

    @contextmanager
    def kept(self) -> Iterator[None]:
        event.listen(Engine, "commit", self.commit)
        event.listen(Engine, "before_cursor_execute", self.execute)
        try:
            yield
        finally:
            event.remove(Engine, "commit", self.commit)
            event.remove(Engine, "before_cursor_execute", self.execute)


@pytest.mark.req("PG-06")
def test_acknowledging_costs_no_commit_of_its_own(shop: Shop) -> None:
    """Beyond the one commit of each message there are those of each batch, to claim it and to record its starts, and
    those of each call and each second."""
    shop.send(order(0))
    shop.drain()  # makes the tables
    spent = []
    for number in (50, 550):
        shop.send(*(order(1000 * number + each) for each in range(number)))
        ledger = Ledger()
        with ledger.kept():
            assert shop.drain().succeeded == number
        assert ledger.statements == {"in its own transaction": 0, "in the handler's": number}
        spent.append(ledger.commits)
    batches, seconds = 500 // 50, 100
    assert 500 + 2 * batches <= spent[1] - spent[0] <= 500 + 2 * batches + seconds
    assert len(shop.bookings()) == 601
    assert shop.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


@pytest.mark.req("PG-06")
def test_a_duplicate_leaves_the_queue_in_the_transaction_that_finds_it_out(shop: Shop) -> None:
    shop.send(order(1))
    shop.drain()
    shop.send(order(1), order(2))
    ledger = Ledger()
    with ledger.kept():
        report = shop.drain()
    assert (report.succeeded, report.duplicates) == (2, 1)
    assert ledger.statements["in the handler's"] == 2
    assert shop.bookings() == [1, 2]
    assert shop.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


@pytest.mark.req("PG-07")
@pytest.mark.parametrize("mode", ["transactional", "effectful"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
def test_nothing_stays_of_an_attempt_whose_lease_was_lost(
    schema: Schema, mode: str, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with on_postgresql(schema, asynchronous=asynchronous, mode=mode) as shop:
        steal = "UPDATE onceward_queue_messages SET token = token + 1"
        shop.meanwhile = lambda number: shop.do(steal)
        shop.send(order(1))
        assert shop.drain().failed == 1
        assert "lease" in caplog.text
        assert shop.bookings() == []
        assert shop.ask("SELECT count(*) FROM onceward_dedup") == [0]
        assert shop.ask("SELECT count(*) FROM onceward_queue_messages") == [1], "a newer delivery has it"
        assert shop.ask("SELECT count(*) FROM onceward_queue_log WHERE ended > 0") == [0]

        shop.meanwhile = lambda number: None
        shop.do("UPDATE onceward_queue_messages SET leased_until = 1")
        assert shop.drain().succeeded == 1
        assert shop.bookings() == [1]
        assert shop.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


@pytest.mark.req("PG-06")
def test_what_the_handler_fails_at_stays_in_the_queue(shop: Shop) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("not today")

    shop.meanwhile = fail
    shop.send(order(1))
    assert shop.drain().failed == 1
    assert shop.bookings() == []
    counts = shop.counts()
    assert counts["ready"] + counts["delayed"] == 1


@pytest.mark.req("PG-06")
def test_a_queue_in_another_database_is_settled_on_its_own(schema: Schema, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/shop.db"
    shop = Shop(source_in(schema), database, create_engine(database), asynchronous=False)
    check_settled_on_its_own(shop)
    shop.engine.dispose()


@pytest.mark.req("PG-06")
def test_transactions_that_would_collide_with_a_lease_are_not_joined(
    schema: Schema, caplog: pytest.LogCaptureFixture
) -> None:
    database = f"{schema.plain_url}%20-cdefault_transaction_isolation%3Drepeatable%5C%20read"
    with on_postgresql(schema, database, asynchronous=False) as shop:
        check_settled_on_its_own(shop)
    assert "repeatable read" in caplog.text


@pytest.mark.req("PG-06")
def test_a_role_that_may_not_remove_messages_is_not_joined(
    schema: Schema, caplog: pytest.LogCaptureFixture
) -> None:
    role = f"role_{schema.name}"
    database = schema.plain_url.replace("postgres:@", f"{role}:@", 1)
    with on_postgresql(schema, database, asynchronous=False) as shop:
        shop.send()
        shop.do(f"CREATE ROLE {role} LOGIN")
        try:
            shop.do(f"GRANT ALL ON SCHEMA {schema.name} TO {role}")
            shop.do(f"GRANT ALL ON bookings TO {role}")
            shop.do(f"GRANT SELECT ON onceward_queue_schema, onceward_queue_messages TO {role}")
            check_settled_on_its_own(shop)
        finally:
            shop.do(f"DROP OWNED BY {role}")
            shop.do(f"DROP ROLE {role}")
    assert "grant it SELECT and DELETE" in caplog.text


def check_settled_on_its_own(shop: Shop) -> None:
    shop.send(order(1))
    ledger = Ledger()
    with ledger.kept():
        assert shop.drain().succeeded == 1
    assert ledger.statements == {"in its own transaction": 1, "in the handler's": 0}
    assert shop.bookings() == [1]
    assert shop.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}
