"""Group commit: events that wait together share one commit, and none of them can fail another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event as events
from sqlalchemy import text

from onceward import Onceward, Transaction
from onceward.app.build import open_task, open_task_async
from onceward.connectors import SqliteConnector
from onceward.db import SessionError
from onceward.errors import ConfigurationError
from onceward.inbox import Contract
from onceward.inbox.commits.group import CommitGroup
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.task.groups import pace, together
from onceward.task.settings import EngineSettings
from onceward.testing.inbox import InboxSuite
from onceward.testing.inbox.effects import effectful
from onceward.testing.inbox.samples import contract
from tests.integration.inbox.test_engine import UnderTheEngine, paid, write
from tests.support.inbox import databases
from tests.support.inbox.databases import OnAsyncPostgreSql, OnAsyncSqlite, OnPostgreSql, OnSqlite
from tests.support.world import retry
from tests.unit.db.test_cancellation import SLOW

schema = databases.schema
TABLES = ("onceward_queue_orders_messages", "onceward_outbox", "onceward_dedup")


def of_order(id_: str, number: int, **more: Any) -> Transaction:
    return paid(id_, aggregate_id="order-1", sequence=number, **more)


class Groups(InboxSuite):
    """Every shop here commits in groups, with one worker, so all that waits is one group."""

    database: str
    shop = UnderTheEngine.shop
    a_file_for_the_queue = UnderTheEngine.a_file_for_the_queue

    @pytest.fixture(autouse=True)
    def however_slow_the_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(together, "LONGEST", 1000.0)
        monkeypatch.setattr(pace, "QUICK", 1000.0)

    def task_of(self, shop: Any, process: Any = write, **more: Any) -> Any:
        task = shop.task(process, **more)
        task.commit = "group"
        return task

    def consume(self, shop: Any, task: Any, **policy: Any) -> Any:
        return shop.consume(task, concurrency=1, **policy)

    @contextmanager
    def decided(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        """How many events each commit of a group had."""
        sizes: list[int] = []
        commit = CommitGroup._commit

        async def noted(group: CommitGroup) -> bool:
            count = len(group._kept)
            done = await commit(group)
            sizes.append(count if done else -count)
            return done

        with monkeypatch.context() as patch:
            patch.setattr(CommitGroup, "_commit", noted)
            yield sizes

    @pytest.mark.req("GC-01")
    def test_events_that_wait_together_share_a_commit_and_one_alone_has_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with self.shop() as shop, self.decided(monkeypatch) as sizes:
            shop.put(*[paid(f"t{n}") for n in range(5)])
            assert self.consume(shop, self.task_of(shop)).succeeded == 5
            assert sizes == [5]
            assert sorted(shop.written()) == [f"t{n}" for n in range(5)]
            shop.put(paid("t5"), paid("t0"))
            report = self.consume(shop, self.task_of(shop))
            assert (report.succeeded, report.duplicates) == (2, 1)
            shop.put(paid("t6"))
            assert self.consume(shop, self.task_of(shop)).succeeded == 1
            assert sizes == [5, 2, 1]
            assert len(shop.driver.rows("SELECT tracking_id FROM onceward_dedup")) == 7

    @pytest.mark.req("GC-02")
    def test_an_event_that_fails_is_undone_alone_and_its_neighbors_are_committed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[str] = []

        def process(transaction: Transaction, session: Any) -> None:
            calls.append(transaction.id)
            write(transaction, session)
            if transaction.id == "t2":
                raise TransactionException("no", category=ExceptionCategory.BUSINESS)

        with self.shop() as shop, self.decided(monkeypatch) as sizes:
            shop.put(*[paid(f"t{n}") for n in range(5)])
            report = self.consume(shop, self.task_of(shop, process))
            assert (report.succeeded, report.failed) == (4, 1)
            assert sorted(shop.written()) == ["t0", "t1", "t3", "t4"]
            assert calls == ["t0", "t1", "t2", "t3", "t4"]
            assert sizes == [2, 2]

    @pytest.mark.req("GC-02")
    def test_a_failed_attempt_is_retried_before_the_next_event_begins(self) -> None:
        calls: list[str] = []

        def process(transaction: Transaction, session: Any) -> None:
            calls.append(transaction.id)
            write(transaction, session)
            if calls.count("t1") == 1 and transaction.id == "t1":
                raise ValueError("once")

        with self.shop() as shop:
            shop.put(*[paid(f"t{n}") for n in range(4)])
            report = self.consume(shop, self.task_of(shop, process), process=retry(2))
            assert (report.succeeded, report.retries) == (4, 1)
            assert calls == ["t0", "t1", "t1", "t2", "t3"]

    @pytest.mark.req("GC-03")
    def test_if_the_commit_fails_each_event_is_done_by_itself_and_only_the_guilty_fails(self) -> None:
        calls: list[str] = []

        def process(transaction: Transaction, session: Any) -> None:
            calls.append(transaction.id)
            session.execute(
                "INSERT INTO late (parent) VALUES (:id)", {"id": 1 if transaction.id == "t2" else 0}
            )
            write(transaction, session)

        with self.shop() as shop:
            self.constrain(shop)
            shop.put(*[paid(f"t{n}") for n in range(4)])
            report = self.consume(shop, self.task_of(shop, process))
            assert (report.succeeded, report.failed) == (3, 1)
            assert sorted(shop.written()) == ["t0", "t1", "t3"]
            assert calls == ["t0", "t1", "t2", "t3", "t0", "t1", "t2", "t3"]
            assert len(shop.driver.rows("SELECT tracking_id FROM onceward_dedup")) == 3

    def constrain(self, shop: Any) -> None:
        """A constraint that is checked at the commit."""
        engine = shop.driver.plain_engine
        driver = shop.driver.engine
        if engine.dialect.name == "sqlite":
            target = getattr(driver, "sync_engine", driver)
            events.listen(target, "connect", _with_foreign_keys)
            shop.driver.wait_for(driver.dispose())
        shop.driver.do("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        shop.driver.do("INSERT INTO parents VALUES (0)")
        shop.driver.do(
            "CREATE TABLE late (parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)"
        )

    @pytest.mark.req("GC-05")
    @pytest.mark.parametrize("how", ["ROLLBACK", "COMMIT"])
    def test_code_that_ends_the_transaction_cannot_lose_or_double_a_neighbor(self, how: str) -> None:
        broken: list[str] = []

        def break_it(transaction: Any) -> None:
            raw = transaction.connection.connection
            raw.rollback() if how == "ROLLBACK" else raw.commit()

        def process(transaction: Transaction, session: Any) -> None:
            write(transaction, session)
            if transaction.id == "t1" and not broken:
                broken.append(transaction.id)
                session.run(break_it)

        with self.shop() as shop:
            shop.put(*[paid(f"t{n}") for n in range(4)])
            report = self.consume(shop, self.task_of(shop, process), process=retry(2))
            assert (report.succeeded, report.failed) == (4, 0)
            assert shop.written() == ["t0", "t1", "t2", "t3"]
            assert len(shop.driver.rows("SELECT tracking_id FROM onceward_dedup")) == 4

    @pytest.mark.req("GC-05")
    def test_a_session_cannot_be_used_after_its_event_though_the_group_is_open(self) -> None:
        kept: list[Any] = []
        refused: list[Exception] = []

        def process(transaction: Transaction, session: Any) -> None:
            if kept:
                try:
                    kept[0].execute("INSERT INTO written (tracking_id) VALUES ('late')")
                except Exception as error:
                    refused.append(error)
            kept.append(session)
            write(transaction, session)

        with self.shop() as shop:
            shop.put(paid("t0"), paid("t1"))
            assert self.consume(shop, self.task_of(shop, process)).succeeded == 2
            assert shop.written() == ["t0", "t1"]
            assert isinstance(refused[0], SessionError)

    @pytest.mark.req("GC-06")
    def test_events_of_an_aggregate_are_done_in_their_order(self) -> None:
        with self.shop(contract(sequencing="strict")) as shop:
            shop.put(of_order("t2", 2), of_order("t1", 1), of_order("t3", 3), of_order("t4", 4))
            total = shop.consume_all(self.task_of(shop))
            assert (total.succeeded, total.failed) == (4, 0)
            assert shop.steps("process") == ["t1", "t2", "t3", "t4"] or shop.steps("process")[0] == "t1"
            assert shop.written() == ["t1", "t2", "t3", "t4"]

    @pytest.mark.req("GC-07")
    def test_a_suspect_runs_alone_after_the_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.shop() as shop, self.decided(monkeypatch) as sizes:
            shop.driver.do(
                "INSERT INTO onceward_attempts (consumer_id, tracking_id, event_day, starts, ends, last_at) "
                f"VALUES ('{shop.contract.consumer_id}', 't2', 0, 1, 0, 0)"
            )
            shop.put(*[paid(f"t{n}") for n in range(5)])
            assert self.consume(shop, self.task_of(shop)).succeeded == 5
            assert sizes == [2, 2]
            assert shop.written() == [f"t{n}" for n in range(5)]

    @pytest.mark.req("GC-08")
    def test_slow_handlers_are_not_grouped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(together, "LONGEST", 0.001)
        monkeypatch.setattr(pace, "QUICK", 0.0)

        def process(transaction: Transaction, session: Any) -> None:
            write(transaction, session)
            time.sleep(0.005)

        with self.shop() as shop, self.decided(monkeypatch) as sizes:
            shop.put(*[paid(f"t{n}") for n in range(4)])
            assert self.consume(shop, self.task_of(shop, process)).succeeded == 4
            assert sizes == [1, 1, 1, 1]

    def test_a_stop_lets_the_group_end_and_gives_the_rest_back(self) -> None:
        running: list[Any] = []

        def process(transaction: Transaction, session: Any) -> None:
            write(transaction, session)
            if transaction.id == "t1":
                running[0].stop()

        with self.shop() as shop:
            shop.put(*[paid(f"t{n}") for n in range(4)])
            running.append(self.task_of(shop, process))
            report = self.consume(shop, running[0])
            assert (report.succeeded, report.unstarted) == (2, 2)
            assert shop.written() == ["t0", "t1"]
            assert shop.ask("counts")["ready"] == 2


class InThreads(Groups):
    @pytest.mark.req("GC-04")
    def test_an_attempt_that_runs_out_of_time_takes_no_neighbor_with_it(self) -> None:
        calls: list[str] = []

        def process(transaction: Transaction, session: Any) -> None:
            calls.append(transaction.id)
            write(transaction, session)
            if transaction.id == "t1" and calls.count("t1") == 1:
                session.fetch_one(SLOW[self.database])

        with self.shop() as shop:
            shop.put(*[paid(f"t{n}") for n in range(3)])
            report = self.consume(shop, self.task_of(shop, process), process=retry(2, timeout=1.0))
            assert (report.succeeded, report.failed, report.timed_out) == (3, 0, 1)
            assert shop.written() == ["t0", "t1", "t2"]


class OnAServer(InThreads):
    """On SQLite the lock of a stuck attempt keeps all others out."""

    @pytest.mark.req("GC-04")
    def test_neighbors_of_a_stuck_attempt_go_on_without_it(self) -> None:
        released = threading.Event()

        def process(transaction: Transaction, session: Any) -> None:
            write(transaction, session)
            if transaction.id == "t1":
                released.wait(30)

        with self.shop(redelivery_delay=0.1) as shop:
            shop.put(*[paid(f"t{n}") for n in range(3)])
            task = self.task_of(shop, process, settings=EngineSettings(stuck_grace=0.2))
            try:
                report = self.consume(shop, task, process=retry(1, timeout=0.5))
                assert report.stuck == 1
                assert report.failed_by_category[ExceptionCategory.TIMEOUT] == 1
                assert report.succeeded + report.postponed == 2
            finally:
                released.set()
            total = shop.consume_all(self.task_of(shop))
            assert total.failed == 0
            assert shop.written() == ["t0", "t1", "t2"]


def _with_foreign_keys(raw: Any, _: Any) -> None:
    cursor = raw.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


@pytest.mark.req("GC-04")
def test_a_task_that_is_canceled_for_its_time_takes_no_neighbor_with_it(tmp_path: Path) -> None:
    calls: list[str] = []
    app = Onceward("shop", database=f"sqlite:///{tmp_path / 'shop.db'}")
    source = f"sqlite:///{tmp_path / 'queue.db'}"
    policy = {"steps": {"process": {"retry": {"max_attempts": 2, "timeout": 1.0}}}}

    @app.consumer(source, contract=contract(), policy=policy)
    async def charge(order: dict[str, Any], transaction: Transaction, session: Any) -> None:
        calls.append(transaction.id)
        await session.execute("INSERT INTO charged VALUES (:id)", {"id": transaction.id})
        if calls.count("t1") == 1 and transaction.id == "t1":
            await asyncio.sleep(60)

    async def consume() -> Any:
        consumer = app.consumers["charge"]
        async with open_task_async(app, consumer) as task:
            return await task.consume_transactions(consumer.policy)

    engine = app.create_engine()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE charged (id TEXT)"))
    with SqliteConnector(tmp_path / "queue.db") as queue:
        queue.dispatch_transactions([paid(f"t{n}") for n in range(3)])
    report = asyncio.run(consume())
    assert (report.succeeded, report.failed, report.timed_out) == (3, 0, 1)
    with engine.connect() as connection:
        assert sorted(connection.scalars(text("SELECT id FROM charged"))) == ["t0", "t1", "t2"]
    engine.dispose()


@pytest.mark.req("GC-11")
@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_group_leaves_its_queue_and_publishes_in_its_own_commit(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "LONGEST", 1000.0)
    app = Onceward("shop", database=f"sqlite:///{tmp_path / 'shop.db'}")
    source = f"sqlite:///{tmp_path / 'shop.db'}?queue=orders"
    policy = {"loop": {"concurrency": {"value": 1}}}
    target = f"sqlite:///{tmp_path / 'sent.db'}"
    engine = app.create_engine()
    left: list[list[int]] = []

    def look() -> None:
        with engine.connect() as connection:
            left.append([connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0 for table in TABLES])

    if asynchronous:

        @app.consumer(source, contract=contract(), policy=policy, name="charge")
        async def charge_async(order: dict[str, Any], session: Any) -> None:
            await session.send(target, order)
            look()

    else:

        @app.consumer(source, contract=contract(), policy=policy)
        def charge(order: dict[str, Any], session: Any) -> None:
            session.send(target, order)
            look()

    with SqliteConnector(tmp_path / "shop.db", queue="orders") as queue:
        queue.dispatch_transactions([paid(f"t{n}") for n in range(3)])
    assert consume_all(app).succeeded == 3
    look()
    assert left == [[3, 0, 0], [3, 0, 0], [3, 0, 0], [0, 3, 3]]
    engine.dispose()


def consume_all(app: Onceward) -> Any:
    consumer = app.consumers["charge"]
    if not consumer.asynchronous:
        with open_task(app, consumer) as task:
            return task.consume_transactions(consumer.policy)

    async def consume() -> Any:
        async with open_task_async(app, consumer) as task:
            return await task.consume_transactions(consumer.policy)

    return asyncio.run(consume())


@pytest.mark.req("GC-09")
@pytest.mark.parametrize(
    ("commit", "promised", "remedy"),
    [
        ("both", contract(), "'group' .* or 'each'"),
        ("group", None, "pass contract="),
        ("group", effectful(), "Leave `commit` out"),
    ],
)
def test_what_cannot_be_committed_like_this_is_refused_where_it_is_written(
    commit: Any, promised: Contract | None, remedy: str
) -> None:
    app = Onceward("shop", database="sqlite://")
    with pytest.raises(ConfigurationError, match=remedy):

        @app.consumer("memory://orders", contract=promised, commit=commit)
        def charge(order: dict[str, Any], session: Any = None) -> None: ...


class TestSqlite(OnSqlite, InThreads):
    database = "sqlite"


class TestAsyncPostgreSql(OnAsyncPostgreSql, Groups):
    database = "postgresql"


@pytest.mark.long
class TestAsyncSqlite(OnAsyncSqlite, Groups):
    database = "sqlite"


class TestPostgreSql(OnPostgreSql, OnAServer):
    database = "postgresql"
