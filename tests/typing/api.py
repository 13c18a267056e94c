"""The public API as users write it. It never runs: `mypy --strict` checks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any, assert_type

import redis
import redis.asyncio
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from onceward import (
    AsyncConsumerTask,
    AsyncHybridTask,
    AsyncProducerTask,
    ConsumerTask,
    HybridTask,
    Onceward,
    ProducerTask,
    Transaction,
    testing,
)
from onceward.app.build import open_task
from onceward.boundary import (
    Appended,
    AsyncBoundaryClient,
    AsyncBoundaryConsumer,
    BoundaryClient,
    BoundaryConsumer,
    Page,
    StoredFact,
    envelope_for,
    fact_of,
    message_id_for,
)
from onceward.boundary.strategies import LatestPerKey, OncePerId, idempotent_outcome
from onceward.connectors import DeadLetter
from onceward.connectors.boundary import AsyncBoundaryConnector, BoundaryConnector
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.db import AsyncDbSession, DbSession, LockTimeoutError, OptimisticConflict
from onceward.inbox import AsyncInboxSession, Contract, InboxSession
from onceward.queue import (
    AsyncQueueConsumer,
    AsyncRedisStreamsQueue,
    BacklogStats,
    QueueConfig,
    QueueConsumer,
    QueueError,
    QueueMessage,
    RedisStreamsQueue,
    UndecodableEntryError,
)
from onceward.task.exceptions import (
    ConsumerLoopTimeoutException,
    ExceptionCategory,
    FetchException,
    LoopError,
    ProducerLoopTimeoutException,
    TransactionException,
)
from onceward.task.mixins.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    EmptyQueuePolicy,
    ExceptionPolicy,
    FetchPolicy,
    ProcessPolicy,
    ProducePolicy,
    ProducerLoopPolicy,
    ProducerPolicy,
    ProducerSteps,
    RetryPolicy,
    SuccessPolicy,
)
from onceward.task.report import Report, StopReason
from onceward.task.settings import EngineSettings
from onceward.task.work import Outcome, OutcomeStatus
from onceward.verify import Examination, Verification, examine_app

# ── transactions ────────────────────────────────────────────────────────────────────────────────────────

order = Transaction(payload={"order": 7}, metadata={"tenant": "a"}, source="shop")
assert_type(order.id, str)
assert_type(order.transaction_id, str)
assert_type(order.created_at, datetime)
assert_type(order.correlation_id, str | None)
assert_type(order.parent_id, str | None)
assert_type(order.source, str | None)
assert_type(order.derive(payload={"order": 8}), Transaction)


# ── connectors and services ─────────────────────────────────────────────────────────────────────────────


class Queue:
    def fetch_transactions(self, size: int, *, shard: int = 0) -> list[Transaction]:
        return [Transaction(payload=number) for number in range(size)]


class AsyncQueue:
    async def fetch_transactions_async(self, size: int) -> list[Transaction]:
        return [Transaction(payload=number) for number in range(size)]


class Mailer:
    def send(self, text: str) -> int:
        return len(text)


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────


class Orders(ConsumerTask):
    settings = EngineSettings(stuck_grace=5.0)

    def process_transaction(self, transaction: Transaction) -> int:
        if transaction.payload is None:
            raise TransactionException("no order", category=ExceptionCategory.BUSINESS)
        mailer: Mailer = self.services["mailer"]
        return mailer.send("thanks")

    def handle_transaction_success(self, transaction: Transaction, result: int) -> None: ...

    def handle_transaction_exception(self, transaction: Transaction, exc: TransactionException) -> None:
        assert_type(exc.category, ExceptionCategory)
        assert_type(exc.transaction_id, str | None)
        assert_type(exc.cause, BaseException | None)


class AsyncOrders(AsyncConsumerTask):
    async def process_transaction(self, transaction: Transaction) -> str:
        return transaction.id

    async def handle_transaction_success(self, transaction: Transaction, result: str) -> None: ...

    async def handle_transaction_exception(
        self, transaction: Transaction, exc: TransactionException
    ) -> None: ...


class Invoices(ProducerTask):
    def produce_transaction(self, transaction: Transaction) -> None: ...

    def handle_produce_success(self, transaction: Transaction, result: None) -> None: ...

    def handle_produce_exception(self, transaction: Transaction, exc: TransactionException) -> None: ...


class AsyncInvoices(AsyncProducerTask):
    async def produce_transaction(self, transaction: Transaction) -> bool:
        return True


class Relay(HybridTask):
    def process_transaction(self, transaction: Transaction) -> Report:
        return self.produce_transactions([transaction.derive()])

    def produce_transaction(self, transaction: Transaction) -> None: ...


class AsyncRelay(AsyncHybridTask):
    async def process_transaction(self, transaction: Transaction) -> Report:
        return await self.produce_transactions([transaction.derive()])

    async def produce_transaction(self, transaction: Transaction) -> None: ...


# ── policies ────────────────────────────────────────────────────────────────────────────────────────────

patient = RetryPolicy(max_attempts=5, timeout=2.0, backoff=0.1, backoff_multiplier=2.0, backoff_cap=3.0)
consumer_policy = ConsumerPolicy(
    loop=ConsumerLoopPolicy(
        batch=BatchPolicy(size=100, min_size=1, max_size=500),
        concurrency=ConcurrencyPolicy(value=8, max=16),
        timeout=60.0,
        limit=None,
        transaction_timeout=10,
        streaming=True,
        empty_queue=EmptyQueuePolicy(backoff=0.5, backoff_cap=10.0),
        mode="continuous",
    ),
    steps=ConsumerSteps(
        fetch=FetchPolicy(retry=patient, extra={"shard": 3}, connector_name="orders"),
        process=ProcessPolicy(retry=patient),
        success=SuccessPolicy(retry=RetryPolicy(max_attempts=2)),
        exception=ExceptionPolicy(),
    ),
)
producer_policy = ProducerPolicy(
    loop=ProducerLoopPolicy(batch=BatchPolicy(size=10), limit=1000),
    steps=ProducerSteps(produce=ProducePolicy(retry=patient), success=SuccessPolicy()),
)
assert_type(ConsumerPolicy.load("policy.toml"), ConsumerPolicy)
assert_type(ProducerPolicy.from_env("ORDERS_"), ProducerPolicy)
assert_type(ProducerPolicy.from_env("ORDERS_", {"ORDERS_LOOP__LIMIT": "3"}), ProducerPolicy)
assert_type(ConsumerPolicy.model_validate({}), ConsumerPolicy)
assert_type(consumer_policy.loop.concurrency.value, int)
assert_type(consumer_policy.loop.timeout, float | None)
assert_type(consumer_policy.steps.fetch.extra, dict[str, Any])
assert_type(producer_policy.steps.produce.retry.backoff, float)


# ── calls ───────────────────────────────────────────────────────────────────────────────────────────────


def consume() -> None:
    task = Orders(connectors={"orders": Queue()}, services={"mailer": Mailer()})
    try:
        report = task.consume_transactions(consumer_policy)
    except FetchException as error:
        assert_type(error.report, Report | None)
        assert_type(error.cause, BaseException | None)
        return
    except ConsumerLoopTimeoutException:
        return
    assert_type(report, Report)
    assert_type(report.processed, int)
    assert_type(report.succeeded, int)
    assert_type(report.failed, int)
    assert_type(report.failed_by_category, dict[ExceptionCategory, int])
    assert_type(report.timed_out, int)
    assert_type(report.stuck, int)
    assert_type(report.abandoned, int)
    assert_type(report.unstarted, int)
    assert_type(report.retries, int)
    assert_type(report.fetches, int)
    assert_type(report.empty_fetches, int)
    assert_type(report.duration, float)
    assert_type(report.stop_reason, StopReason | None)
    assert_type(task.consume_transactions(), Report)
    assert_type(task.start_processing(order, consumer_policy), Outcome)
    task.stop()


def produce(numbers: Iterator[int]) -> None:
    task = Invoices(connectors={}, settings=EngineSettings(io_guard="warn"))
    try:
        assert_type(
            task.produce_transactions((Transaction(payload=n) for n in numbers), producer_policy), Report
        )
        assert_type(task.produce_transactions([order]), Report)
    except ProducerLoopTimeoutException as error:
        assert_type(error.report, Report | None)
    except LoopError as error:
        assert_type(error.category, ExceptionCategory)
    outcome = task.start_producing(order)
    assert_type(outcome.transaction, Transaction)
    assert_type(outcome.status, OutcomeStatus)
    assert_type(outcome.error, TransactionException | None)
    assert_type(outcome.attempt, int)
    task.stop()


async def orders() -> AsyncIterator[Transaction]:
    yield order


async def both() -> None:
    consumer = AsyncOrders(connectors={"source": AsyncQueue()})
    assert_type(await consumer.consume_transactions(), Report)
    assert_type(await consumer.start_processing(order), Outcome)
    producer = AsyncInvoices(connectors={})
    assert_type(await producer.produce_transactions(orders(), producer_policy), Report)
    assert_type(await producer.produce_transactions([order]), Report)
    assert_type(await producer.start_producing(order), Outcome)
    relay = AsyncRelay(connectors={"source": AsyncQueue()})
    assert_type(await relay.consume_transactions(), Report)
    assert_type(Relay(connectors={"source": Queue()}).consume_transactions(), Report)


# ── the database session ────────────────────────────────────────────────────────────────────────────────


def bill(msg: QueueMessage, session: DbSession) -> None:
    assert_type(session.execute("UPDATE orders SET paid = :paid", {"paid": True}), int)
    assert_type(session.execute("INSERT INTO lines VALUES (:n)", [{"n": 1}, {"n": 2}]), int)
    assert_type(session.execute_scalar("SELECT count(*) FROM orders"), Any)
    assert_type(
        session.fetch_one("SELECT * FROM orders WHERE id = :id", {"id": msg.id}), dict[str, Any] | None
    )
    assert_type(session.fetch_all("SELECT * FROM orders"), list[dict[str, Any]])
    assert_type(session.insert_idempotent("bills", {"id": msg.id}, key=["id"]), bool)
    try:
        assert_type(session.occ_update("orders", {"id": 7}, {"paid": True}, expected=3), int)
        assert_type(session.lock_row("orders", {"id": 7}, timeout=1.0), dict[str, Any] | None)
        session.advisory_lock("billing", timeout=1.0)
    except OptimisticConflict as error:
        assert_type(error.key, dict[str, Any])
    except LockTimeoutError:
        return


async def bill_async(msg: QueueMessage, session: AsyncDbSession) -> None:
    assert_type(await session.execute("DELETE FROM orders"), int)
    assert_type(await session.fetch_one("SELECT 1 AS one"), dict[str, Any] | None)
    assert_type(await session.insert_idempotent("bills", {"id": msg.id}), bool)
    assert_type(await session.occ_update("orders", {"id": 7}, {}, expected=3, version_column="v"), int)


def in_one_transaction(engine: Engine) -> bool:
    with DbSession(engine) as session:
        assert_type(session, DbSession)
    return session.committed


# ── the honest queue ────────────────────────────────────────────────────────────────────────────────────

config = QueueConfig("orders", "billing", "billing-1", block_ms=1000, claim_idle_ms=5000)


def honest(client: redis.Redis, engine: Engine) -> None:
    queue = RedisStreamsQueue(client, config)
    assert_type(queue.enqueue({"order": 7}), str)
    assert_type(queue.read(block_ms=100, count=10), list[QueueMessage])
    assert_type(queue.claim_stale(min_idle_ms=100, count=10), list[QueueMessage])
    assert_type(queue.backlog_stats(), BacklogStats)
    with QueueConsumer(client, config) as consumer:
        assert_type(consumer.next(), QueueMessage | None)
        for message in consumer.iter_messages():
            assert_type(message.payload, Any)
            assert_type(message.deliveries, int | None)
            consumer.ack(message)
        try:
            consumer.run(handler=bill, engine=engine)
            consumer.run_claim_stale(handler=bill, engine=engine, min_idle_ms=100, wait_ms=100)
        except UndecodableEntryError as error:
            assert_type(error.entries, tuple[QueueMessage, ...])
        except QueueError as error:
            assert_type(error.cause, BaseException | None)
        consumer.stop()


async def honest_async(client: redis.asyncio.Redis, engine: AsyncEngine) -> None:
    queue = AsyncRedisStreamsQueue(client, config)
    assert_type(await queue.enqueue([1, 2]), str)
    async with AsyncQueueConsumer(client, config) as consumer:
        assert_type(await consumer.next(100), QueueMessage | None)
        async for message in consumer.iter_messages():
            await consumer.ack(message)
        await consumer.run(handler=bill_async, engine=engine)
        assert_type(await consumer.claim_stale(), list[QueueMessage])
        assert_type(await consumer.backlog_stats(), BacklogStats)
        consumer.stop()


# ── Redis under the engine ──────────────────────────────────────────────────────────────────────────────


def on_redis(client: redis.Redis) -> None:
    with RedisStreamsConnector(client, "orders", "billing", lease=30.0, max_deliveries=3) as connector:
        Orders(connectors={"source": connector}, services={"mailer": Mailer()}).consume_transactions()
        assert_type(connector.counts(), dict[str, int])
        assert_type(connector.dead_letters(limit=10), list[DeadLetter])


async def on_redis_async() -> None:
    async with AsyncRedisStreamsConnector("redis://localhost", "orders") as connector:
        await AsyncOrders(connectors={"source": connector}).consume_transactions()
        assert_type(await connector.counts_async(), dict[str, int])


def boundary(engine: Engine) -> None:
    client = BoundaryClient("http://127.0.0.1:7700", timeout=5.0)
    envelope = envelope_for(
        message_id_for("batch", "B1", 7), from_zone="a", to_zone="b", labels={"site": "x"}
    )
    assert_type(client.append(envelope, fact_of("batch:B1", "done", {"litres": 480})), Appended)
    assert_type(client.fetch("c", limit=100), Page)
    assert_type(client.confirm("c", 7), int)

    @OncePerId("c")
    def book(fact: StoredFact, session: DbSession) -> None:
        assert_type(fact.offset, int)

    @LatestPerKey("c", key=lambda fact: fact.fact.object["tank"])
    def level(fact: StoredFact, session: DbSession) -> None: ...

    @idempotent_outcome("sets a level")
    def again(fact: StoredFact, session: DbSession) -> None: ...

    consumer = BoundaryConsumer(client, "c", limit=100)
    for handler in (book, level, again):
        consumer.run(handler, engine)
    consumer.stop()
    ConsumerTask({"source": BoundaryConnector(client, "c")})


async def async_boundary(engine: AsyncEngine) -> None:
    async with AsyncBoundaryClient("http://127.0.0.1:7700") as client:
        assert_type(await client.fetch("c"), Page)

        @OncePerId("c")
        async def book(fact: StoredFact, session: AsyncDbSession) -> None: ...

        await AsyncBoundaryConsumer(client, "c").run(book, engine)
        AsyncConsumerTask({"source": AsyncBoundaryConnector(client, "c")})


# ── apps ────────────────────────────────────────────────────────────────────────────────────────────────

app = Onceward("shop", database="sqlite:///shop.db", processes=2)
promise = Contract(
    consumer_id="bill", event_types=["*"], owner_team="shop", idempotency_mechanism="one transaction"
)


@app.consumer("sqlite:///orders.db", policy={"loop": {"limit": 3}})
def charge(total: int) -> str:
    return str(total)


@app.consumer(
    "redis://localhost/orders?group=billing", contract=promise, policy=consumer_policy, name="bills"
)
def book(total: int, session: InboxSession, transaction: Transaction) -> None:
    session.execute(
        "INSERT INTO bills (id, total) VALUES (:id, :total)", {"id": transaction.id, "total": total}
    )


@app.consumer("memory://orders", contract=promise, verification={"events": []})
async def book_later(total: int, session: AsyncInboxSession) -> int:
    return total


class Payments:
    def pay(self, total: int) -> str:
        return str(total)


@app.service
def payments() -> Iterator[Payments]:
    yield Payments()


@app.service(outside=False)
async def rates() -> dict[str, float]:
    return {}


@app.consumer("memory://payments", contract=promise, verification={"services": {Payments: Payments()}})
def pay(total: int, payments: Payments, session: InboxSession) -> None:
    session.effect("pay", lambda key: payments.pay(total))


assert_type(payments(), Iterator[Payments])
verification = Verification(services={"payments": Payments, Payments: Payments()}, allow=["localhost:8080"])
assert_type(examine_app(app)[0], Examination)
with open_task(app, app.consumers["pay"], services={Payments: Payments()}) as opened:
    assert_type(opened, ConsumerTask)


@app.producer("sqlite:///orders.db", policy=producer_policy)
def place(count: int) -> Iterator[int]:
    yield from range(count)


@app.producer(charge)
async def place_later(count: int) -> AsyncIterator[int]:
    yield count


assert_type(charge(3), str)
assert_type(place(3), Iterator[int])
assert_type(charge.send(3), str)
assert_type(charge.send(3, id="order-3"), str)
assert_type(charge.send_many([3, 4]), Report)
assert_type(place.send(3), Report)
place.send("three")  # type: ignore[arg-type]
assert_type(app.consumers["charge"].send(3), str)
assert_type(app.produce(place, 3), Report)
app.produce(place, "three")  # type: ignore[arg-type]
app.produce(place, count="three")  # type: ignore[arg-type]
app.produce(place)  # type: ignore[call-arg]
app.produce(place, 3, 4)  # type: ignore[call-arg]
assert_type(app.settings.database, str | None)
assert_type(app.settings.engine, EngineSettings)
assert_type(app.create_engine(), Engine)
assert_type(app.create_async_engine(), AsyncEngine)
assert_type(app.consumers["charge"].asynchronous, bool)


async def use_app() -> None:
    assert_type(await app.produce_async(place_later, 3), Report)
    await app.produce_async(place_later, "three")  # type: ignore[arg-type]


@app.service(per="message", outside=False)
def ledger(db: Session, transaction: Transaction) -> Payments:
    return Payments()


app.service(per="thread")  # type: ignore[call-overload]


@app.lifespan
def lifespan() -> Iterator[None]:
    yield


@app.consumer("memory://orm", contract=promise)
def through_the_orm(order: dict[str, int], db: Session, inbox: InboxSession) -> None:
    db.flush()


with testing.app(app, services={Payments: Payments()}) as under_test:
    assert_type(under_test, testing.AppUnderTest)
    assert_type(under_test.send(through_the_orm, {"id": 1}), str)
    assert_type(under_test.drain(), Report)
    assert_type(under_test.advance("24h"), Report)
    assert_type(under_test.effects, list[testing.RecordedEffect])
    assert_type(under_test.published, list[testing.Published])
    assert_type(under_test.rows("SELECT 1"), list[dict[str, Any]])


async def use_app_under_test() -> None:
    async with testing.app(app) as under_test:
        assert_type(await under_test.send("orm", {}), str)
        assert_type(await under_test.drain(), Report)
