"""A consumer with a contract that runs out of time in a thread: its SQL is canceled, and it commits nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from onceward import Transaction, cancel_requested
from onceward.task.exceptions import AttemptInterrupted, ExceptionCategory
from onceward.task.settings import EngineSettings
from onceward.testing.inbox import InboxSuite
from onceward.testing.inbox.effects import effectful
from onceward.testing.inbox.samples import contract
from tests.integration.inbox.test_engine import Shop, UnderTheEngine, paid, write
from tests.support.inbox import databases
from tests.support.inbox.databases import OnPostgreSql, OnSqlite
from tests.support.wait import until
from tests.support.world import retry
from tests.unit.db.test_cancellation import SLOW

schema = databases.schema
pytestmark = pytest.mark.timeout(90)


class OutOfTime(InboxSuite):
    shop = UnderTheEngine.shop
    a_file_for_the_queue = UnderTheEngine.a_file_for_the_queue
    slow: str

    @pytest.mark.req("CE-43")
    def test_a_slow_statement_is_canceled_and_the_next_attempt_commits(self) -> None:
        attempts: list[str] = []

        def process(transaction: Transaction, session: Any) -> None:
            attempts.append(transaction.id)
            write(transaction, session)
            if len(attempts) == 1:
                session.fetch_one(self.slow)

        with self.shop(contract(poison_after=1)) as shop:
            shop.put(paid("t1"))
            began = time.monotonic()
            report = shop.consume(shop.task(process), process=retry(2, timeout=1.0))
            assert time.monotonic() - began < 30
            assert (report.succeeded, report.timed_out, report.stuck) == (1, 1, 0)
            assert shop.written() == ["t1"]

    @pytest.mark.req("CE-43", "CE-44")
    def test_an_attempt_that_ends_after_it_was_given_up_on_commits_nothing(self) -> None:
        given_up, ended = threading.Event(), threading.Event()

        def process(transaction: Transaction, session: Any) -> None:
            write(transaction, session)
            given_up.wait(30)
            ended.set()

        with self.shop() as shop:
            shop.put(paid("t1"))
            task = shop.task(process, settings=EngineSettings(stuck_grace=0.2))
            report = shop.consume(task, process=retry(3, timeout=0.5))
            assert (report.failed_by_category[ExceptionCategory.TIMEOUT], report.stuck) == (1, 1)
            given_up.set()
            assert ended.wait(30)
            until(lambda: _ends(shop) == (1, 1))
            assert shop.written() == []

    @pytest.mark.req("CE-43")
    def test_an_outside_call_is_ended_by_its_canceller_and_none_begins_after_the_deadline(self) -> None:
        begun: list[str] = []

        def process(transaction: Transaction, session: Any) -> None:
            hung_up = threading.Event()

            def charge(key: str) -> str:
                begun.append("charge")
                if len(begun) > 1:
                    return key
                hung_up.wait(30)
                raise ConnectionError("hung up")

            session.effect("charge", charge, cancel=hung_up.set)
            write(transaction, session)

        with self.shop(effectful()) as shop:
            shop.put(paid("t1"))
            report = shop.consume(shop.task(process), process=retry(2, timeout=1.0))
            assert (report.succeeded, report.timed_out) == (1, 1)
            assert begun == ["charge", "charge"]
            assert shop.written() == ["t1"]

    @pytest.mark.req("CE-43")
    def test_no_effect_begins_after_the_deadline(self) -> None:
        refused: list[BaseException] = []

        def process(transaction: Transaction, session: Any) -> None:
            until(cancel_requested)
            try:
                session.effect("charge", lambda key: pytest.fail("called after the deadline"))
            except BaseException as error:
                refused.append(error)
                raise

        with self.shop(effectful()) as shop:
            shop.put(paid("t1"))
            report = shop.consume(shop.task(process), process=retry(1, timeout=0.5))
            assert report.failed_by_category[ExceptionCategory.TIMEOUT] == 1
            assert isinstance(refused[0], AttemptInterrupted)


def _ends(shop: Shop) -> tuple[int, int]:
    return shop.ledger().get("t1", (0, 0))


class TestSqlite(OnSqlite, OutOfTime):
    slow = SLOW["sqlite"]


class TestPostgreSql(OnPostgreSql, OutOfTime):
    slow = SLOW["postgresql"]
