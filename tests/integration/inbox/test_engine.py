"""The inbox under the engine: consumer tasks with a contract, on queues in memory and in a file."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from sqlite3 import connect
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import AsyncConsumerTask, ConsumerTask, Transaction, cancel_requested
from onceward.connectors import (
    AsyncMemoryConnector,
    AsyncSqliteConnector,
    BurialReason,
    MemoryConnector,
    SqliteConnector,
)
from onceward.errors import ConfigurationError
from onceward.inbox import AsyncInbox, Contract, ContractError, Inbox, UnregisteredConsumerError
from onceward.task.exceptions import ExceptionCategory, SettlementException
from onceward.task.report import Report
from onceward.task.settings import EngineSettings
from onceward.task.work import OutcomeStatus
from onceward.testing.inbox import InboxDriver, InboxSuite
from onceward.testing.inbox.effects import Provider, effectful
from onceward.testing.inbox.samples import LONG_AGO, Held, Killed, contract, raising
from onceward.testing.inbox.schema import OLD_AND_NEW, OrderV3, third_version
from onceward.testing.telemetry import record
from tests.support.inbox import databases
from tests.support.inbox.databases import OnAsyncPostgreSql, OnAsyncSqlite, OnPostgreSql, OnSqlite
from tests.support.queue.world import QueueWorld
from tests.support.wait import until
from tests.support.world import consuming, retry

schema = databases.schema

QUEUES = {
    ("memory", False): MemoryConnector,
    ("memory", True): AsyncMemoryConnector,
    ("file", False): SqliteConnector,
    ("file", True): AsyncSqliteConnector,
}


def paid(id_: str, payload: Any = None, **metadata: Any) -> Transaction:
    return Transaction(
        id=id_,
        payload={"amount": 1} if payload is None else payload,
        metadata={"event_type": "order.paid", **metadata},
        created_at=LONG_AGO,
    )


def write(transaction: Transaction, session: Any) -> str:
    session.execute("INSERT INTO written (tracking_id) VALUES (:id)", {"id": transaction.id})
    return f"wrote {transaction.id}"


def never(transaction: Transaction, session: Any) -> None:
    raise AssertionError("the handler was called")


class Shop:
    """One consumer with its inbox, its queue, and a record of its calls."""

    def __init__(self, suite: InboxSuite, driver: InboxDriver, promised: Contract, queue: Any) -> None:
        self.suite = suite
        self.driver = driver
        self.contract = promised
        self.queue = queue
        self.calls: list[tuple[str, str]] = []
        self.errors: list[Any] = []
        self.lost_outcomes = 0

    def task(
        self,
        process: Callable[..., Any] = write,
        *,
        services: dict[str, Any] | None = None,
        settings: EngineSettings | None = None,
        contract: Any = None,
    ) -> Any:
        return self._class(process)(
            contract or self.contract,
            connectors={"source": self.queue},
            services={"inbox": self.driver.inbox} if services is None else services,
            settings=settings,
        )

    def _class(self, process: Callable[..., Any]) -> Any:
        shop, behave = self, self.driver.adapt(process)
        base: Any = AsyncConsumerTask if self.driver.asynchronous else ConsumerTask

        class Billing(base):  # type: ignore[misc]
            def __init__(self, promised: Any, **injected: Any) -> None:
                super().__init__(**injected)
                self.contract = promised

        def noted(step: str, transaction: Transaction) -> None:
            shop.calls.append((step, transaction.id))

        if self.driver.asynchronous:

            async def process_async(task: Any, transaction: Transaction, session: Any) -> Any:
                noted("process", transaction)
                return await behave(transaction, session)

            async def success_async(task: Any, transaction: Transaction, result: Any) -> None:
                noted("success", transaction)

            async def exception_async(task: Any, transaction: Transaction, error: Any) -> None:
                noted("exception", transaction)
                shop.errors.append(error)

            methods: tuple[Any, ...] = process_async, success_async, exception_async
        else:

            def process_sync(task: Any, transaction: Transaction, session: Any) -> Any:
                noted("process", transaction)
                return behave(transaction, session)

            def success_sync(task: Any, transaction: Transaction, result: Any) -> None:
                noted("success", transaction)

            def exception_sync(task: Any, transaction: Transaction, error: Any) -> None:
                noted("exception", transaction)
                shop.errors.append(error)

            methods = process_sync, success_sync, exception_sync
        names = "process_transaction", "handle_transaction_success", "handle_transaction_exception"
        for name, method in zip(names, methods, strict=True):
            setattr(Billing, name, method)
        return Billing

    def consume(self, task: Any, **policy: Any) -> Report:
        report = self.driver.wait_for(task.consume_transactions(consuming(**policy)))
        assert isinstance(report, Report)
        return report

    def consume_all(self, task: Any, **policy: Any) -> Report:
        """Consume until the queue is empty, with time passing for delayed messages. Returns the sum of the reports."""
        total = Report()
        deadline = time.monotonic() + 30
        while True:
            report = self.consume(task, **policy)
            for name in ("succeeded", "duplicates", "failed", "postponed", "retries", "timed_out"):
                setattr(total, name, getattr(total, name) + getattr(report, name))
            counts = self.ask("counts")
            if not counts["ready"] + counts["delayed"] + counts["leased"]:
                return total
            assert time.monotonic() < deadline, f"never empty: {counts}"
            self.driver.clock.advance(2)
            time.sleep(0.01)

    def put(self, *transactions: Transaction) -> None:
        self.ask("dispatch_transactions", transactions)

    def ask(self, name: str, *args: Any) -> Any:
        return self.driver.wait_for(
            getattr(self.queue, f"{name}_async" if self.driver.asynchronous else name)(*args)
        )

    def lose_the_next_outcome(self) -> None:
        """The queue does not accept the next outcomes: a lost acknowledgement."""
        name = "settle_transactions_async" if self.driver.asynchronous else "settle_transactions"
        settle = getattr(self.queue, name)

        def fail(settlements: Any) -> Any:
            setattr(self.queue, name, settle)
            self.lost_outcomes += 1
            raise ConnectionError("lost")

        async def fail_async(settlements: Any) -> Any:
            fail(settlements)

        setattr(self.queue, name, fail_async if self.driver.asynchronous else fail)

    def steps(self, step: str) -> list[str]:
        return [id_ for called, id_ in self.calls if called == step]

    def written(self) -> list[str]:
        return self.suite.written(self.driver)

    def ledger(self) -> dict[str, tuple[int, int]]:
        rows = self.driver.rows("SELECT tracking_id, starts, ends FROM onceward_attempts")
        return {row["tracking_id"]: (row["starts"], row["ends"]) for row in rows}


class UnderTheEngine(InboxSuite):
    @pytest.fixture(autouse=True)
    def a_file_for_the_queue(self, tmp_path: Path) -> None:
        self.queue_path = tmp_path / "queue.db"

    @contextmanager
    def shop(
        self,
        promised: Contract | None = None,
        *,
        queue: str = "memory",
        patience: float = 5.0,
        **settings: Any,
    ) -> Iterator[Shop]:
        promised = promised or contract()
        with self.inbox(promised, patience=patience) as driver:
            place = (self.queue_path,) if queue == "file" else ()
            made = QUEUES[queue, driver.asynchronous](*place, clock=driver.clock, **settings)
            shop = Shop(self, driver, promised, made)
            try:
                yield shop
            finally:
                shop.ask("close")

    @pytest.mark.req("CC-002")
    @pytest.mark.parametrize("queue", ["memory", "file"])
    def test_a_redelivery_after_a_lost_acknowledgement_is_a_duplicate_and_calls_nobody(
        self, queue: str
    ) -> None:
        with self.shop(queue=queue) as shop:
            shop.put(paid("t1"))
            task = shop.task()
            shop.lose_the_next_outcome()
            with pytest.raises(SettlementException):
                shop.consume(task)
            shop.driver.clock.advance(61)
            report = shop.consume(task)
            assert (report.succeeded, report.duplicates, report.failed) == (1, 1, 0)
            assert shop.calls == [("process", "t1"), ("success", "t1")]
            assert shop.written() == ["t1"]
            assert sum(shop.ask("counts").values()) == 0

    @pytest.mark.req("CC-002")
    def test_the_outcome_of_a_duplicate_is_a_success_that_says_so(self) -> None:
        with self.shop() as shop:
            task = shop.task()
            first, second = (shop.driver.wait_for(task.start_processing(paid("t1"))) for _ in range(2))
            assert (first.status, first.duplicate, first.result) == (
                OutcomeStatus.SUCCEEDED,
                False,
                "wrote t1",
            )
            assert (second.status, second.duplicate, second.result) == (OutcomeStatus.SUCCEEDED, True, None)
            assert shop.steps("success") == ["t1"]

    @pytest.mark.req("CC-002")
    @pytest.mark.req("CC-012")
    @pytest.mark.parametrize("queue", ["memory", "file"])
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_many_copies_in_many_slots_are_each_done_once(self, queue: str, mode: str) -> None:
        with self.shop(contract(mode=mode), queue=queue) as shop:
            names = [f"t{number}" for number in range(12)]
            shop.put(*(paid(name) for _ in range(3) for name in names))
            total = shop.consume_all(shop.task(), batch=12, concurrency=4)
            assert shop.written() == sorted(names)
            assert (total.succeeded, total.duplicates, total.failed) == (36, 24, 0)
            assert sorted(shop.steps("success")) == sorted(names)

    @pytest.mark.req("CC-012")
    def test_each_attempt_has_a_session_of_its_own_and_a_failed_one_leaves_nothing(self) -> None:
        sessions: list[Any] = []

        def fail_twice(transaction: Transaction, session: Any) -> None:
            sessions.append(getattr(session, "_session", session))
            write(transaction, session)
            if len(sessions) < 3:
                raise RuntimeError("again")

        with self.shop() as shop:
            shop.put(paid("t1"))
            report = shop.consume(shop.task(fail_twice), process=retry(3))
            assert (report.succeeded, report.retries) == (1, 2)
            assert len({id(session) for session in sessions}) == 3
            assert shop.written() == ["t1"]

    @pytest.mark.req("CC-032")
    def test_a_failure_goes_to_the_exception_handler_and_back_to_the_queue(self) -> None:
        with self.shop(redelivery_delay=5.0) as shop:
            shop.put(paid("t1"))
            report = shop.consume(shop.task(raising(RuntimeError("broken"))), process=retry(2))
            assert report.failed_by_category[ExceptionCategory.SYSTEM] == 1
            assert shop.steps("exception") == ["t1"]
            assert isinstance(shop.errors[0].cause, RuntimeError)
            assert shop.ask("counts")["delayed"] == 1
            shop.driver.clock.advance(6)
            assert shop.consume(shop.task()).succeeded == 1
            assert shop.written() == ["t1"]

    @pytest.mark.req("CC-032")
    @pytest.mark.parametrize("breach", ["conflict", "event_type", "schema", "envelope"])
    def test_an_event_that_breaks_the_contract_is_set_aside_at_once_and_leaves_no_start(
        self, breach: str
    ) -> None:
        with self.shop() as shop:
            shop.put(paid("t1"))
            shop.consume(shop.task())
            bad = {
                "conflict": paid("t1", {"amount": 2}),
                "event_type": paid("t2", event_type="order.lost"),
                "schema": paid("t2", schema_version=9),
                "envelope": paid("t2", sequence="first"),
            }[breach]
            shop.put(bad, paid("t3"))
            report = shop.consume(shop.task(), process=retry(3))
            assert report.failed_by_category[ExceptionCategory.BUSINESS] == 1
            assert report.retries == 0
            assert isinstance(shop.errors[0], ContractError)
            assert shop.errors[0].kind == breach
            [letter] = shop.ask("dead_letters")
            assert (letter.transaction_id, letter.reason) == (bad.id, BurialReason.FAILED)
            assert shop.written() == ["t1", "t3"]
            assert all(starts == ends for id_, (starts, ends) in shop.ledger().items() if id_ == bad.id)

    @pytest.mark.req("CC-051")
    @pytest.mark.parametrize("reported", [True, False], ids=["reported", "not reported"])
    def test_what_is_given_back_at_a_stop_is_not_counted_as_a_start(self, reported: bool) -> None:
        """Whether or not the queue accepts the settlement: its work was never begun."""
        with self.shop(contract(poison_after=2)) as shop:
            names = [f"t{number}" for number in range(4)]
            shop.put(*map(paid, names))
            running: list[Any] = []

            def stop(transaction: Transaction, session: Any) -> None:
                running[-1].stop()
                write(transaction, session)

            for number in range(3):
                task = shop.task(stop)
                running.append(task)
                if reported:
                    report = shop.consume(task)
                    assert (report.succeeded, report.unstarted) == (1, 3 - number)
                else:
                    shop.lose_the_next_outcome()
                    with pytest.raises(SettlementException):
                        shop.consume(task)
                    shop.driver.clock.advance(61)
                given_back = {id_: count for id_, count in shop.ledger().items() if count[0] == count[1]}
                assert len(given_back) >= 3 - number
            shop.consume_all(shop.task())
            assert shop.written() == names

    @pytest.mark.req("CC-051")
    def test_what_a_broken_queue_leaves_unbegun_is_not_counted_as_a_start(self) -> None:
        """The queue fails in the middle of a batch: nothing more is settled, including what was never begun."""
        with self.shop(contract(poison_after=2)) as shop:

            def second_waits_for_the_failure(transaction: Transaction, session: Any) -> None:
                if transaction.id == "t1":
                    until(lambda: shop.lost_outcomes)
                    time.sleep(0.3)  # so the loop, and not this slot, goes on first
                write(transaction, session)

            shop.put(*(paid(f"t{number}") for number in range(4)))
            shop.lose_the_next_outcome()
            task = shop.task(second_waits_for_the_failure)
            task.commit = "each"  # in a group, the first has no outcome before the second has run
            with pytest.raises(SettlementException):
                shop.consume(task)
            assert shop.steps("process")[:2] == ["t0", "t1"]
            begun = set(shop.steps("process"))
            unbegun = {id_: count for id_, count in shop.ledger().items() if id_ not in begun}
            assert all(starts == ends == 1 for starts, ends in unbegun.values())
            assert len(unbegun) == 4 - len(begun)
            shop.driver.clock.advance(61)
            shop.consume_all(shop.task())
            assert shop.written() == ["t0", "t1", "t2", "t3"]

    @pytest.mark.req("CC-051")
    def test_an_event_that_kills_its_process_is_set_aside_and_its_batch_mates_are_done(self) -> None:
        def die(transaction: Transaction, session: Any) -> None:
            write(transaction, session)
            if transaction.id == "bad":
                raise Killed

        with self.shop(contract(poison_after=2), max_deliveries=10) as shop:
            shop.put(paid("a"), paid("bad"), paid("b"), paid("c"))
            crashes = 0
            for _ in range(10):
                try:
                    shop.consume(shop.task(die))
                except Killed:
                    crashes += 1
                self.advance(shop.driver, 61)
            assert crashes == 2
            assert shop.written() == ["a", "b", "c"]
            [letter] = shop.ask("dead_letters")
            assert (letter.transaction_id, letter.category) == ("bad", ExceptionCategory.BUSINESS)
            assert "2 times" in letter.error

    @pytest.mark.req("CC-051")
    def test_an_attempt_that_runs_out_of_time_is_tried_again_at_once_and_is_no_crash(self) -> None:
        attempts: list[str] = []

        def hang_first(transaction: Transaction, session: Any) -> None:
            attempts.append(transaction.id)
            until(lambda: len(attempts) >= 2 or cancel_requested())

        async def hang_first_async(transaction: Transaction, session: Any) -> None:
            attempts.append(transaction.id)
            if len(attempts) < 2:
                await asyncio.sleep(30)

        with self.shop(contract(poison_after=1)) as shop:
            shop.put(paid("t1"))
            task = shop.task(hang_first_async if shop.driver.asynchronous else hang_first)
            report = shop.consume(task, process=retry(3, timeout=1.0))
            assert (report.succeeded, report.timed_out, report.retries) == (1, 1, 1)
            assert (report.postponed, report.failed) == (0, 0)

    @pytest.mark.req("CC-012")
    def test_an_event_that_another_has_in_hand_goes_back_and_is_a_duplicate_later(self) -> None:
        with self.shop(effectful()) as shop, self.another(shop.driver) as other, Held() as held:
            first = paid("t1")

            def stay(event: Any, session: Any) -> None:
                held.stay()
                write(first, session)

            held.begin(other.process, effectful(), first, stay).until_inside()
            shop.put(first)
            report = shop.consume(shop.task(never), process=retry(1))
            assert (report.postponed, report.failed, report.succeeded) == (1, 0, 0)
            assert shop.ask("counts")["delayed"] == 1
            held.end()
            total = shop.consume_all(shop.task(never))
            assert (total.succeeded, total.duplicates) == (1, 1)
            assert shop.written() == ["t1"]
            assert shop.steps("exception") == []

    @pytest.mark.req("CC-003")
    def test_the_key_of_an_effect_stays_over_the_engines_retries_and_a_redelivery(self) -> None:
        provider = Provider(*(TimeoutError("slow") for _ in range(3)))

        def charge(transaction: Transaction, session: Any) -> None:
            session.effect("charge", provider.charge)
            write(transaction, session)

        with self.shop(effectful()) as shop:
            shop.put(paid("t1"))
            total = shop.consume_all(shop.task(charge), process=retry(2))
            assert (total.succeeded, total.failed) == (1, 1)
            assert len(provider.keys) == 4
            assert len(set(provider.keys)) == 1
            assert shop.written() == ["t1"]

    @pytest.mark.req("CC-020")
    def test_strict_order_holds_whatever_order_they_are_fetched_in(self) -> None:
        done: list[str] = []

        def note(transaction: Transaction, session: Any) -> None:
            write(transaction, session)
            done.append(transaction.id)

        with self.shop(contract(sequencing="strict")) as shop:
            events = [
                paid(f"{name}{number}", aggregate_id=name, sequence=number)
                for number in (3, 1, 2)
                for name in "ab"
            ]
            shop.put(*events)
            total = shop.consume_all(shop.task(note), process=retry(1))
            assert [id_ for id_ in done if id_ < "b"] == ["a1", "a2", "a3"]
            assert [id_ for id_ in done if id_ > "b"] == ["b1", "b2", "b3"]
            assert (total.succeeded, total.failed) == (6, 0)
            assert total.postponed >= 2
            assert shop.ledger().keys() <= {events[-1].id, *done}

    @pytest.mark.req("WK-06")
    def test_a_parked_event_is_delivered_as_soon_as_its_predecessor_is_done(self) -> None:
        with self.shop(contract(sequencing="strict")) as shop:
            shop.put(*(paid(f"a{number}", aggregate_id="a", sequence=number) for number in (3, 2, 1)))
            report = shop.consume(shop.task())  # no time passes: the clock stands still
            assert report.succeeded == 3
            assert report.postponed >= 2
            assert shop.written() == ["a1", "a2", "a3"]

    @pytest.mark.req("CC-020")
    def test_a_gap_that_nobody_fills_ends_as_a_dead_letter(self) -> None:
        with self.shop(contract(sequencing="strict", gap_timeout=30)) as shop:
            shop.put(paid("t2", aggregate_id="a", sequence=2))
            assert shop.consume(shop.task()).postponed == 1
            self.advance(shop.driver, 31)
            report = shop.consume(shop.task())
            assert report.failed_by_category[ExceptionCategory.BUSINESS] == 1
            assert shop.errors[0].kind == "gap"
            assert len(shop.ask("dead_letters")) == 1

    @pytest.mark.req("CC-021")
    def test_every_version_reaches_the_task_as_the_current_one_and_its_copy_is_a_duplicate(self) -> None:
        seen: list[Any] = []
        with self.shop(third_version()) as shop:
            events = [paid(f"t{number}", payload) for number, payload in enumerate(OLD_AND_NEW)]
            shop.put(*events)
            task = shop.task(lambda transaction, _: seen.append((transaction.id, transaction.payload)))
            shop.consume(task)
            assert seen == [(f"t{number}", OrderV3(700, "EUR")) for number in range(3)]
            shop.put(*events)
            assert shop.consume(task).duplicates == 3
            assert len(seen) == 3

    @pytest.mark.req("CC-040")
    @pytest.mark.parametrize("wrong", ["unregistered", "no tables", "no service", "no inbox", "no contract"])
    def test_a_consumer_that_may_not_run_is_refused_before_anything_is_fetched(self, wrong: str) -> None:
        with self.shop() as shop, InboxDriver(self.engine_without_tables(), shop.driver.clock) as empty:
            shop.put(paid("t1"))
            task, said = {
                "unregistered": lambda: (shop.task(contract=contract("stranger")), "register"),
                "no tables": lambda: (shop.task(services={"inbox": empty.inbox}), "migrate"),
                "no service": lambda: (shop.task(services={}), "services="),
                "no inbox": lambda: (shop.task(services={"inbox": object()}), "must be an"),
                "no contract": lambda: (shop.task(contract={"consumer_id": "billing"}), "must be a Contract"),
            }[wrong]()
            with pytest.raises(ConfigurationError, match=said) as refused:
                shop.consume(task)
            assert (wrong == "unregistered") == isinstance(refused.value, UnregisteredConsumerError)
            assert shop.ask("counts") == {"ready": 1, "leased": 0, "delayed": 0, "dead": 0}
            assert shop.calls == []

    def test_an_inbox_of_the_other_mode_is_refused_before_anything_is_fetched(self) -> None:
        with self.shop() as shop:
            shop.put(paid("t1"))
            made: Any = (
                Inbox(create_engine("sqlite://"))
                if shop.driver.asynchronous
                else AsyncInbox(create_async_engine("sqlite+aiosqlite://"))
            )
            with pytest.raises(ConfigurationError, match=r"must be an (Async)?Inbox"):
                shop.consume(shop.task(services={"inbox": made}))
            assert shop.ask("counts")["ready"] == 1

    @pytest.mark.req("CC-022")
    def test_a_consumer_that_fails_or_dies_holds_up_no_other(self) -> None:
        good = contract("good")
        with self.shop(contract("bad")) as shop:
            shop.driver.call("register", good)
            shop.put(*(paid(f"t{number}") for number in range(5)))
            bad = shop.task(raising(RuntimeError("broken")))
            assert shop.consume(bad).failed == 5
            other = MemoryOf(shop)
            other.put(*(paid(f"t{number}") for number in range(5)))
            dying = other.task(raising(Killed()), contract=contract("bad"))
            with pytest.raises(Killed):
                other.consume(dying)
            other.driver.clock.advance(61)
            report = other.consume(other.task(contract=good))
            assert (report.succeeded, report.failed) == (5, 0)
            assert shop.written() == [f"t{number}" for number in range(5)]

    @pytest.mark.req("CC-041")
    def test_report_metrics_and_spans_tell_the_same(self) -> None:
        with record() as recording, self.shop() as shop:
            shop.put(paid("t1"), paid("t2"), paid("t1"), paid("t3", event_type="order.lost"))
            report = shop.consume(shop.task())
            assert (report.succeeded, report.duplicates, report.failed) == (3, 1, 1)
            for outcome, count in (("done", 2), ("duplicate", 1), ("contract", 1)):
                assert recording.metric("onceward.inbox.events", outcome=outcome, consumer="billing") == count
            assert recording.metric("onceward.inbox.duplicates", consumer="billing") == 1
            ids = [dict(span.attributes or {}).get("tracking_id") for span in recording.spans("process")]
            assert sorted(map(str, ids)) == ["t1", "t1", "t2", "t3"]

    @pytest.mark.req("CC-032")
    def test_no_payload_stands_in_any_log_of_inbox_or_engine(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "onceward")

        def wrong(transaction: Transaction, session: Any) -> None:
            session.execute("INSERT INTO nowhere VALUES (:card)", {"card": transaction.payload["card"]})

        with self.shop() as shop:
            shop.put(paid("t1", {"card": "4711-0815"}), paid("t2", {"card": "4711-0815"}, event_type="x"))
            shop.consume(shop.task(wrong), process=retry(2))
            letters = shop.ask("dead_letters")
        said = [logging.Formatter().format(line) for line in caplog.records]
        assert len(said) > 3
        assert [line for line in said if "4711-0815" in line] == []
        assert "4711-0815" not in str([letter.error for letter in letters])
        failed = [line for line in caplog.records if getattr(line, "tracking_id", None) == "t1"]
        assert [(vars(line)["attempt"], vars(line)["lock_token"]) for line in failed] == [(0, 1), (1, 2)]

    def test_the_session_is_no_io_of_the_tasks_own(self) -> None:
        with self.shop() as shop:
            shop.put(paid("t1"), paid("t2"))
            report = shop.consume(shop.task(settings=EngineSettings(io_guard="raise")))
            assert (report.succeeded, report.failed) == (2, 0)


class MemoryOf(Shop):
    """A queue next to that of another shop."""

    def __init__(self, shop: Shop) -> None:
        queue = QUEUES["memory", shop.driver.asynchronous](clock=shop.driver.clock)
        super().__init__(shop.suite, shop.driver, shop.contract, queue)


class LockedFile(OnSqlite, UnderTheEngine):
    @pytest.mark.req("CC-012")
    def test_while_the_database_is_locked_events_go_back_and_no_attempt_is_spent(self) -> None:
        with self.shop(contract(poison_after=1), patience=0.02, max_deliveries=1) as shop:
            shop.put(paid("t0"))
            task = shop.task()
            shop.consume(task)
            shop.put(paid("t1"), paid("t2"))
            with closing(connect(self.path, isolation_level=None, check_same_thread=False)) as other:
                other.execute("BEGIN IMMEDIATE")
                report = shop.consume(task, process=retry(1))
                assert (report.postponed, report.failed, report.retries) == (2, 0, 0)
                assert shop.ask("counts")["delayed"] == 2
            total = shop.consume_all(task, process=retry(1))
            assert (total.succeeded, total.failed) == (2, 0)
            assert shop.written() == ["t0", "t1", "t2"]
            assert shop.steps("exception") == []


class TestSqlite(LockedFile): ...


class TestAsyncSqlite(OnAsyncSqlite, LockedFile): ...


class TestPostgreSql(OnPostgreSql, UnderTheEngine): ...


class TestAsyncPostgreSql(OnAsyncPostgreSql, UnderTheEngine): ...


# ── engines ─────────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_of_the_wrong_kind_is_refused_with_the_name_of_the_right_inbox() -> None:
    with pytest.raises(ConfigurationError, match="AsyncInbox"):
        Inbox(create_async_engine("sqlite+aiosqlite://"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="use Inbox"):
        AsyncInbox(create_engine("sqlite://"))  # type: ignore[arg-type]


# ── inside QueueConsumer.run ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["threads", "asyncio"])
def queue_world(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[QueueWorld]:
    with QueueWorld(request.param, redis_url, tmp_path) as world:
        yield world


class Joined:
    """The inbox inside the session that `QueueConsumer.run` opens."""

    def __init__(self, world: QueueWorld, promised: Contract) -> None:
        self.world = world
        self.contract = promised
        self.results: list[str] = []
        self.inbox: Any = (AsyncInbox if world.asynchronous else Inbox)(world.engine)
        self.call(self.inbox.migrate)
        self.call(self.inbox.register, promised)

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        made = method(*args)
        return self.world._loop.run_until_complete(made) if self.world._loop is not None else made

    def handler(self, before: Callable[[Any], Any], stop: Callable[[], Any]) -> Any:
        insert = "INSERT INTO effects (id) VALUES (:id)"

        def ended(result: Any) -> None:
            self.results.append(str(result.handling))
            stop()

        def handle(message: Any, session: Any) -> None:
            def effect(event: Any, session: Any) -> None:
                before(event)
                session.execute(insert, {"id": event.tracking_id})

            ended(self.inbox.process(self.contract, message, effect, session=session))

        async def handle_async(message: Any, session: Any) -> None:
            async def effect(event: Any, session: Any) -> None:
                before(event)
                await session.execute(insert, {"id": event.tracking_id})

            ended(await self.inbox.process(self.contract, message, effect, session=session))

        return handle_async if self.world.asynchronous else handle


MESSAGE = (
    '{"tracking_id": "%s", "event_type": "order.paid", '
    '"created_at": "2020-05-05T12:00:00Z", "payload": {"amount": 1}}'
)


@pytest.mark.req("CC-002")
def test_inside_queue_consumer_run_a_message_that_comes_twice_takes_effect_once(
    queue_world: QueueWorld,
) -> None:
    joined = Joined(queue_world, contract())
    queue_world.add(*(MESSAGE % id_ for id_ in ("e1", "e2", "e1")))
    consumer = queue_world.consumer()
    stop = lambda: consumer.thing.stop() if len(joined.results) == 3 else None  # noqa: E731
    consumer.run(handler=joined.handler(lambda _: None, stop), engine=queue_world.engine)
    assert joined.results == ["done", "done", "duplicate"]
    assert queue_world.effects() == ["e1", "e2"]
    assert queue_world.pending() == []


@pytest.mark.req("CC-051")
def test_inside_queue_consumer_run_redis_counts_the_starts_and_poison_is_refused(
    queue_world: QueueWorld,
) -> None:
    joined = Joined(queue_world, contract(poison_after=2))
    queue_world.add(MESSAGE % "e1")
    started: list[str] = []

    def die(event: Any) -> None:
        started.append(event.tracking_id)
        raise Killed

    run = {"handler": joined.handler(die, lambda: None), "engine": queue_world.engine}
    with pytest.raises(Killed):
        queue_world.consumer(consumer_name="one").run(**run)
    with pytest.raises(Killed):
        queue_world.consumer(consumer_name="two").run_claim_stale(**run, min_idle_ms=0)
    with pytest.raises(ContractError) as refused:
        queue_world.consumer(consumer_name="three").run_claim_stale(**run, min_idle_ms=0)
    assert refused.value.kind == "poison"
    assert started == ["e1", "e1"]
    assert queue_world.effects() == []
    assert len(queue_world.pending()) == 1, "not acknowledged: an operator must inspect it"
