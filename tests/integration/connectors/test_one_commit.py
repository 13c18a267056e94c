"""A queue in the application's database: a message leaves it in the transaction of its handler, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, create_engine, event, text

from onceward import Onceward, Transaction
from onceward.app.build import open_task, open_task_async
from onceward.connectors.leases import LeasingConnector
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.connectors.postgresql.store import PostgreSqlLeaseStore
from onceward.connectors.sqlite import SqliteConnector
from onceward.connectors.sqlite.store import SqliteLeaseStore
from onceward.connectors.urls import Address
from onceward.inbox import AsyncInboxSession, Contract, InboxSession
from onceward.middleware import Middleware, StepCall, StepInfo
from onceward.task.groups import pace, together
from onceward.task.report import Report
from tests.support.schema import Schema, new_schema

WRITE = "INSERT INTO bookings (number) VALUES (:number)"
POLICY = {
    "loop": {"streaming": False, "batch": {"size": 50}, "concurrency": {"value": 4}},
    "steps": {"process": {"retry": {"max_attempts": 1}}},
}


class Booking(msgspec.Struct):
    number: int


class Before(Middleware):
    """Calls `shop.before` between the fetch of a message and its transaction."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        async def process(*arguments: Any) -> Any:
            self._shop.before()
            return await call(*arguments)

        return process if step.name == "process" else call


class Shop:
    """An app with one consumer, whose queue is in its database."""

    def __init__(
        self,
        source: str,
        database: str,
        engine: Engine,
        *,
        asynchronous: bool,
        commit: Any = None,
        **contract: Any,
    ) -> None:
        self.source = Address(source)
        self.app = Onceward("shop", database=database, middleware=[] if commit else [Before(self)])
        self.engine = engine
        self.asynchronous = asynchronous
        self.is_sqlite = engine.dialect.name == "sqlite"
        self.messages = "onceward_queue_orders_messages" if self.is_sqlite else "onceward_queue_messages"
        self.lease_column = "visible_at" if self.is_sqlite else "leased_until"
        self.meanwhile: Callable[[int], None] = lambda number: None
        self.before: Callable[[], None] = lambda: None
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE bookings (number INTEGER)"))
        settings: dict[str, Any] = {"contract": _contract(**contract), "policy": POLICY, "commit": commit}

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
                return task.consume_transactions(self.consumer.policy)

        async def drain() -> Report:
            async with open_task_async(self.app, self.consumer) as task:
                return await task.consume_transactions(self.consumer.policy)

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
    return f"{server}/orders?{options}&redelivery_delay=60"


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


@contextmanager
def on_sqlite(folder: Path, **settings: Any) -> Iterator[Shop]:
    database = f"sqlite:///{folder}/shop.db"
    engine = create_engine(database)
    try:
        yield Shop(f"{database}?queue=orders&redelivery_delay=60", database, engine, **settings)
    finally:
        engine.dispose()


Make = Callable[..., AbstractContextManager[Shop]]


@pytest.fixture(params=["postgresql", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a shop whose queue is in its database."""
    if request.param == "sqlite":
        return partial(on_sqlite, tmp_path)
    return partial(on_postgresql, request.getfixturevalue("schema"))


@pytest.fixture(params=["threads", "asyncio"])
def shop(request: pytest.FixtureRequest, make: Make) -> Iterator[Shop]:
    with make(asynchronous=request.param == "asyncio") as made:
        yield made


class Ledger:
    """How messages left their queues in this process, and how many commits its engines made."""

    def __init__(self) -> None:
        self.commits = 0
        self.on_their_own = 0
        self.with_their_handlers = 0
        self.together = 0

    def commit(self, _: Any) -> None:
        self.commits += 1

    @contextmanager
    def kept(self) -> Iterator[None]:
        event.listen(Engine, "commit", self.commit)
        with pytest.MonkeyPatch.context() as patch:
            for kind in (PostgreSqlLeaseStore, SqliteLeaseStore):
                patch.setattr(kind, "remove", self._counting(kind.remove, "on_their_own"))
            together = self._counting(PostgreSqlConnector.settle_all_in, "together")
            patch.setattr(PostgreSqlConnector, "settle_all_in", together)
            for connector in (PostgreSqlConnector, SqliteConnector):
                counting = self._counting(connector.settle_in, "with_their_handlers")
                patch.setattr(connector, "settle_in", counting)
            yield
        event.remove(Engine, "commit", self.commit)

    def _counting(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return call(*args)

        return counted


@pytest.mark.req("PG-06")
def test_acknowledging_costs_no_commit_of_its_own(shop: Shop) -> None:
    """Beyond the one commit of each message there are those of each batch, to record its starts, and those of each
    call and each second. A batch is claimed in one statement, without a transaction of the engine."""
    shop.send(order(0))
    shop.drain()  # makes the tables
    spent = []
    for number in (50, 550):
        shop.send(*(order(1000 * number + each) for each in range(number)))
        ledger = Ledger()
        with ledger.kept():
            assert shop.drain().succeeded == number
        assert (ledger.on_their_own, ledger.with_their_handlers) == (0, number)
        spent.append(ledger.commits)
    batches, seconds = 500 // 50, 100
    assert abs(spent[1] - spent[0] - 500 - batches) <= seconds  # those of the seconds are in both
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
    assert (ledger.on_their_own, ledger.with_their_handlers) == (0, 2)
    assert shop.bookings() == [1, 2]
    assert shop.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


@pytest.mark.req("PG-07")
@pytest.mark.parametrize("mode", ["transactional", "effectful"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
def test_nothing_stays_of_an_attempt_whose_lease_was_lost(
    make: Make, mode: str, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with make(asynchronous=asynchronous, mode=mode) as shop:
        steal = f"UPDATE {shop.messages} SET token = token + 1"
        if shop.is_sqlite:  # a handler that has written holds the only lock
            shop.before = lambda: shop.do(steal)
        else:
            shop.meanwhile = lambda number: shop.do(steal)
        shop.send(order(1))
        assert shop.drain().failed == 1
        assert "lease" in caplog.text
        assert shop.bookings() == []
        assert shop.ask("SELECT count(*) FROM onceward_dedup") == [0]
        assert shop.ask(f"SELECT count(*) FROM {shop.messages}") == [1], "a newer delivery has it"
        if not shop.is_sqlite:
            assert shop.ask("SELECT count(*) FROM onceward_queue_log WHERE ended > 0") == [0]

        shop.meanwhile, shop.before = lambda number: None, lambda: None
        shop.do(f"UPDATE {shop.messages} SET {shop.lease_column} = 1")
        assert shop.drain().succeeded == 1
        assert shop.bookings() == [1]
        assert shop.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


@pytest.mark.req("PG-06")
def test_a_lease_that_is_extended_after_the_commit_is_not_reported_as_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make(asynchronous=False) as shop:
        settled = LeasingConnector.settled

        def extend_first(connector: LeasingConnector, delivered: Transaction) -> None:
            connector.extend_transactions([delivered])
            settled(connector, delivered)

        monkeypatch.setattr(LeasingConnector, "settled", extend_first)
        shop.send(order(1))
        assert shop.drain().succeeded == 1
        assert "lease expired" not in caplog.text


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


@pytest.fixture
def always_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(together, "LONGEST", 1000.0)
    monkeypatch.setattr(pace, "QUICK", 1000.0)


@pytest.mark.req("PG-13")
@pytest.mark.usefixtures("always_groups")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
def test_a_group_leaves_its_queue_at_once(schema: Schema, asynchronous: bool) -> None:
    with on_postgresql(schema, asynchronous=asynchronous, commit="group") as shop:
        shop.send(order(0))
        shop.drain()
        shop.send(order(0), *(order(number) for number in range(1, 400)))
        ledger = Ledger()
        with ledger.kept():
            report = shop.drain()
        assert (report.succeeded, report.duplicates) == (400, 1)
        assert ledger.on_their_own == 0
        assert 0 < ledger.together + ledger.with_their_handlers < 200
        assert shop.bookings() == [*range(400)]
        assert shop.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}
        assert shop.ask("SELECT sum(ended) FROM onceward_queue_log") == [401]


@pytest.mark.req("PG-07", "PG-13")
@pytest.mark.usefixtures("always_groups")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
def test_of_a_group_only_the_event_whose_lease_was_lost_is_not_done(
    schema: Schema, asynchronous: bool
) -> None:
    with on_postgresql(schema, asynchronous=asynchronous, commit="group") as shop:
        shop.send(*map(order, range(20)))
        stolen = shop.ask(f"SELECT seq FROM {shop.messages} ORDER BY seq")[3]
        steal = f"UPDATE {shop.messages} SET token = token + 1 WHERE seq = {stolen}"
        shop.meanwhile = lambda number: shop.do(steal) if number == 3 else None
        report = shop.drain()
        assert (report.succeeded, report.failed) == (19, 1)
        assert shop.bookings() == [each for each in range(20) if each != 3]
        assert shop.ask("SELECT count(*) FROM onceward_dedup") == [19]
        assert shop.ask(f"SELECT seq FROM {shop.messages}") == [stolen]

        shop.meanwhile = lambda number: None
        shop.do(f"UPDATE {shop.messages} SET {shop.lease_column} = 1")
        assert shop.drain().succeeded == 1
        assert shop.bookings() == [*range(20)]


@pytest.mark.req("PG-13")
def test_a_batch_leaves_its_queue_at_once(schema: Schema) -> None:
    app = Onceward("shop", database=schema.plain_url)
    got: list[int] = []

    @app.consumer(source_in(schema), contract=_contract(), policy=POLICY)
    def book(bookings: list[Booking], session: InboxSession) -> None:
        got.extend(each.number for each in bookings)

    with app.consumers["book"].source.open(asynchronous=False) as queue:
        queue.dispatch_transactions([order(number) for number in range(100)])
        ledger = Ledger()
        with ledger.kept(), open_task(app, app.consumers["book"]) as task:
            assert task.consume_transactions(app.consumers["book"].policy).succeeded == 100
        assert ledger.on_their_own == 0
        assert 0 < ledger.together + ledger.with_their_handlers < 50
        assert sorted(got) == [*range(100)]
        assert queue.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


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
        shop.send(order(0))
        shop.do("DELETE FROM onceward_queue_messages")
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
    assert (ledger.on_their_own, ledger.with_their_handlers) == (1, 0)
    assert shop.bookings() == [1]
    assert shop.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}
