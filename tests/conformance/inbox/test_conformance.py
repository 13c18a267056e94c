"""The inbox stores under their conformance suite, and tests for one store or one mode only."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from random import Random
from threading import Barrier, BrokenBarrierError
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError

from onceward._ids import FIRST_DAY, LAST_DAY, day_in
from onceward.db.backends import BACKENDS
from onceward.inbox import Busy, Event, Handling, InboxSession
from onceward.inbox.stores.types import as_date
from onceward.testing.clock import FakeClock
from onceward.testing.inbox import InboxConformance, InboxDriver, InboxSuite
from onceward.testing.inbox.effects import Provider, charging, effectful
from onceward.testing.inbox.samples import contract, event, never, raising, together, write
from tests.support.inbox import databases
from tests.support.inbox.databases import OnAsyncPostgreSql, OnAsyncSqlite, OnPostgreSql, OnSqlite
from tests.support.inbox.ids import uuid7_of

schema = databases.schema


class OneWriter(OnSqlite):
    """A database in which one connection can block all others."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield

    @pytest.mark.req("CC-012")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_a_locked_database_is_busy_and_no_attempt_is_spent(self, mode: str) -> None:
        promised = contract(mode=mode, poison_after=1)
        with self.inbox(promised) as inbox, self.another(inbox, patience=0.02) as hasty:
            inbox.process(promised, event("before"), write)
            for warm in (False, True):
                with self.locked():
                    for _ in range(3):
                        with pytest.raises(Busy, match="locked"):
                            hasty.process(promised, event("e1"), never)
                if not warm:
                    hasty.process(promised, event("e0"), write)
            tokens: list[str | None] = []
            hasty.process(promised, event("e1"), lambda each, _: tokens.append(each.lock_token))
            assert tokens == ["1"], "the first start"

    @pytest.mark.req("CC-003")
    def test_a_database_that_is_locked_when_a_handler_with_effects_ends_is_busy_and_the_result_is_kept(
        self,
    ) -> None:
        provider = Provider()
        with (
            self.inbox(effectful()) as inbox,
            self.another(inbox, patience=0.02) as hasty,
            closing(sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)) as other,
        ):
            lock = charging(provider, then=lambda *_: other.execute("BEGIN IMMEDIATE"))
            with pytest.raises(Busy):
                hasty.process(effectful(), event("e1"), lock)
            other.execute("ROLLBACK")
            assert hasty.process(effectful(), event("e1"), charging(provider)).value == {"receipt": 1}
            assert len(provider.keys) == 1

    @pytest.mark.req("CC-051")
    def test_an_end_that_a_locked_database_did_not_take_is_written_with_the_next_start(self) -> None:
        promised = effectful(poison_after=1)
        with (
            self.inbox(promised) as inbox,
            self.another(inbox, patience=0.02) as hasty,
            closing(sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)) as other,
        ):

            def fail(*_: Any) -> None:
                other.execute("BEGIN IMMEDIATE")
                raise ValueError("handler")

            for _ in range(3):
                with pytest.raises(ValueError, match="handler"):
                    hasty.process(promised, event("e1"), fail)
                other.execute("ROLLBACK")
            assert hasty.process(promised, event("e1"), write).handling is Handling.DONE


class Server(OnPostgreSql):
    """A database with concurrent transactions."""

    @contextmanager
    def serializable(self, inbox: InboxDriver) -> Iterator[InboxDriver]:
        with InboxDriver(self.engine(isolation_level="SERIALIZABLE"), inbox.clock) as driver:
            yield driver

    @pytest.mark.req("CC-012")
    def test_a_constraint_that_fails_at_the_commit_takes_row_and_writes_back(self) -> None:
        paid = event("e1")
        with self.inbox() as inbox:
            self.schema.execute(
                f"CREATE TABLE IF NOT EXISTS {self.schema.name}.late "
                "(id text PRIMARY KEY, parent text REFERENCES "
                f"{self.schema.name}.late DEFERRABLE INITIALLY DEFERRED)"
            )

            def break_the_promise(event: Event, session: Any) -> None:
                write(event, session)
                session.execute("INSERT INTO late VALUES ('child', 'nobody')")

            with pytest.raises(IntegrityError):
                inbox.process(contract(), paid, break_the_promise)
            assert self.written(inbox) == []
            assert inbox.rows("SELECT * FROM onceward_dedup") == []
            assert inbox.process(contract(), paid, write).handling is Handling.DONE

    @pytest.mark.req("CC-012")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_serialization_failures_are_tried_again_without_spending_an_attempt(self, mode: str) -> None:
        promised = contract(mode=mode)
        with self.inbox(promised) as inbox, self.serializable(inbox) as strict:
            runs: list[str] = []
            tokens: list[str | None] = []
            meeting = Barrier(2)

            def count_then_write(event: Event, session: Any) -> None:
                runs.append(event.tracking_id)
                tokens.append(event.lock_token)
                session.execute_scalar("SELECT count(*) FROM written")
                meet(meeting)
                write(event, session)

            def deliver(worker: int) -> list[str]:
                names = [f"e{worker}-{number}" for number in range(4)]
                return [
                    str(strict.process(promised, event(name), count_then_write).handling) for name in names
                ]

            assert together(5, deliver) == [["done"] * 4] * 5
            assert len(self.written(inbox)) == 20
            assert set(tokens) == {"1"}, "no second start"
            assert len(runs) > 20, "the conflict was not provoked"

    @pytest.mark.req("CC-012")
    def test_copies_of_one_event_at_once_under_serializable_are_done_once(self) -> None:
        with self.inbox() as inbox, self.serializable(inbox) as strict:
            handlings = together(8, lambda _: str(strict.settle(contract(), event("e1"), write).handling))
            assert sorted(handlings) == ["done"] + ["duplicate"] * 7
            assert self.written(inbox) == ["e1"]

    @pytest.mark.req("CC-012")
    def test_a_deadlock_of_two_handlers_is_tried_again_without_spending_an_attempt(self) -> None:
        with self.inbox() as inbox:
            for name in ("x", "y"):
                inbox.process(contract(), event(name), write)
            meeting = Barrier(2)
            tokens: list[str | None] = []

            def update_both(first: str, second: str) -> Any:
                def handle(event: Event, session: Any) -> None:
                    tokens.append(event.lock_token)
                    update = "UPDATE written SET note = :note WHERE tracking_id = :id"
                    session.execute(update, {"id": first, "note": event.tracking_id})
                    meet(meeting)
                    session.execute(update, {"id": second, "note": event.tracking_id})

                return handle

            handlers = update_both("x", "y"), update_both("y", "x")
            results = together(2, lambda n: inbox.process(contract(), event(f"e{n}"), handlers[n]).handling)
            assert results == [Handling.DONE] * 2
            assert len(tokens) > 2, "one of them ran again, on a busy machine more than once"
            assert set(tokens) == {"1"}, "as one attempt"
            assert len({row["note"] for row in inbox.rows("SELECT note FROM written")}) == 1

    @pytest.mark.req("CC-022")
    def test_a_start_whose_row_a_frozen_process_keeps_is_busy_and_not_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limit = "SELECT set_config('lock_timeout', '50ms', true)"
        monkeypatch.setattr("onceward.inbox.stores.postgresql.PostgreSqlStore.limit_waiting", limit)
        with self.inbox() as inbox, self.another(inbox) as other:
            with pytest.raises(ValueError, match="once"):
                inbox.process(contract(), event("e1"), raising(ValueError("once")))
            with other.session() as frozen:
                frozen.execute("SELECT * FROM onceward_attempts FOR UPDATE")
                with pytest.raises(Busy, match="row is locked"):
                    inbox.process(contract(), event("e1"), never)
            tokens: list[str | None] = []
            inbox.process(contract(), event("e1"), lambda each, _: tokens.append(each.lock_token))
            assert tokens == ["2"]

    @pytest.mark.req("CC-010")
    def test_rows_lie_in_the_partition_of_the_day_in_their_id(self) -> None:
        with self.inbox() as inbox:
            today = int(time.time()) // 86_400
            for id_ in (uuid7_of(20_500, "a"), uuid7_of(20_501, "b"), uuid7_of(today, "c"), "an order"):
                inbox.process(contract(), event(id_), write)
            rows = inbox.rows(
                "SELECT tableoid::regclass::text AS name FROM onceward_dedup ORDER BY event_day"
            )
            assert [row["name"] for row in rows] == [
                "onceward_dedup_other",
                "onceward_dedup_20260127_20260603",
                "onceward_dedup_20260127_20260603",
                f"onceward_dedup_{as_date(today)}".replace("-", ""),
            ]

    @pytest.mark.req("CC-053")
    def test_the_database_and_the_code_agree_on_the_partition_of_an_id(self) -> None:
        random = Random(7)
        first, last = FIRST_DAY * 86_400_000, (LAST_DAY + 1) * 86_400_000
        times = [0, first - 1, first, last - 1, last, 2**48 - 1]
        times += [random.randrange(first, last) for _ in range(200)] + [
            random.getrandbits(48) for _ in range(200)
        ]
        ids = ["", "e1"]
        for ms in times:
            for version, variant in ("78", "79", "7a", "7b", "7c", "70", "48", "88"):
                head = f"{ms:012x}"
                ids.append(f"{head[:8]}-{head[8:]}-{version}123-{variant}456-0123456789ab")
        ids += [ids[2].upper(), ids[2].replace("-", ""), f" {ids[2]}"]
        with self.inbox() as inbox:
            rows = inbox.rows(
                "SELECT id, onceward_partition(id) AS place "
                "FROM jsonb_array_elements_text(CAST(:ids AS jsonb)) AS i (id)",
                ids=json.dumps(ids),
            )
        assert len(rows) == len(ids)
        for row in rows:
            day = day_in(row["id"])
            assert row["place"] == (-1 if day is None else day), row["id"]

    @pytest.mark.req("CC-053")
    def test_an_older_version_cannot_store_an_event_by_its_day(self) -> None:
        with self.inbox() as inbox:
            inbox.process(contract(), event(uuid7_of(20_500, "a")), write)
            for id_ in ("e1", str(uuid4()), uuid7_of(20_501, "b"), uuid7_of(20_500, "c").upper()):
                with pytest.raises(DBAPIError, match="older version") as refused:
                    inbox.do(
                        "INSERT INTO onceward_dedup (event_day, consumer_id, tracking_id, payload_sha256) "
                        "VALUES (20500, 'billing', :id, '')",
                        id=id_,
                    )
                assert BACKENDS["postgresql"].is_serialization_failure(refused.value), "it is tried again"

    @pytest.mark.req("CC-010")
    def test_the_first_events_of_a_day_at_once_are_all_done(self) -> None:
        with self.inbox() as inbox, self.another(inbox) as other:
            days = range(20_400, 20_403)

            def deliver(worker: int) -> list[str]:
                driver = (inbox, other)[worker % 2]
                events = [event(uuid7_of(day, worker)) for day in days]
                return [str(driver.settle(contract(), each, write).handling) for each in events]

            assert together(6, deliver) == [["done"] * 3] * 6

    @pytest.mark.req("CC-053", "CC-090")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_an_id_with_a_day_in_the_future_is_done_once(
        self, mode: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        promised = contract(mode=mode)
        today = int(time.time()) // 86_400
        with self.inbox(promised) as inbox:
            ahead = event(uuid7_of(today + 1000, "ahead"))
            assert inbox.process(promised, ahead, write).handling is Handling.DONE
            assert "check the clock of its producer" in caplog.text
            copy = event(ahead.tracking_id.upper(), created_at=datetime(2999, 1, 1, tzinfo=UTC))
            assert inbox.process(promised, copy, never).duplicate

    @pytest.mark.req("CC-090")
    def test_ids_of_hundreds_of_days_do_not_make_hundreds_of_tables(self) -> None:
        """A replay, or an attacker, makes them. Each is still found again."""
        today = int(time.time()) // 86_400
        days = [
            *range(today - 800, today - 20, 7),
            *range(today - 20, today + 20),
            *range(19_723, 29_220, 97),
        ]
        ids = [uuid7_of(day, number) for number, day in enumerate(days)]
        with self.inbox() as inbox:
            for id_ in ids:
                assert inbox.process(contract(), event(id_), write).handling is Handling.DONE
            tables = inbox.rows(PARTITIONS)
            assert len(tables) < 110
            assert all(inbox.process(contract(), event(id_), never).duplicate for id_ in ids)
            [rows] = inbox.rows(
                "SELECT count(*) AS number, count(DISTINCT tracking_id) AS ids FROM onceward_dedup"
            )
            assert (rows["number"], rows["ids"]) == (len(ids), len(ids))
        with self.inbox() as fresh:  # in the order in which time passes, every day has its own again
            for day in range(today - 7, today + 1):
                fresh.process(contract(), event(uuid7_of(day, "x")), write)
            names = {row["relname"] for row in fresh.rows(PARTITIONS)}
            assert {f"onceward_dedup_{as_date(today - 7)}".replace("-", "")} <= names


PARTITIONS = """
    SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = CAST('onceward_dedup' AS regclass)
"""


def meet(meeting: Barrier) -> None:
    """Wait until two threads are here, once."""
    with suppress(BrokenBarrierError):
        meeting.wait(5)
    meeting.abort()


class Threads(InboxSuite):
    """Tests for plain functions only."""

    @pytest.mark.req("CC-032")
    @pytest.mark.parametrize("mode", ["transactional", "effectful"])
    def test_a_stop_iteration_of_the_handler_arrives_as_itself(self, mode: str) -> None:
        promised = contract(mode=mode)
        with self.inbox(promised) as inbox:
            with pytest.raises(StopIteration, match="mine"):
                inbox.process(promised, event("e1"), raising(StopIteration("mine")))
            assert inbox.process(promised, event("e1"), write).handling is Handling.DONE

    @pytest.mark.req("CC-032")
    def test_a_stop_iteration_of_an_effect_arrives_in_the_handler_as_itself(self) -> None:
        with self.inbox(effectful()) as inbox:

            def handle(event: Event, session: InboxSession) -> None:
                with pytest.raises(StopIteration, match="mine"):
                    session.effect("odd", raising(StopIteration("mine")))
                raise OSError("caught")

            with pytest.raises(OSError, match="caught"):
                inbox.process(effectful(), event("e1"), handle)


class TestSqlite(InboxConformance, Threads, OneWriter): ...


@pytest.mark.long  # each database and each mode is in the other two
class TestAsyncSqlite(InboxConformance, OneWriter, OnAsyncSqlite): ...


@pytest.mark.long
class TestPostgreSql(InboxConformance, Threads, Server): ...


class TestAsyncPostgreSql(InboxConformance, Server, OnAsyncPostgreSql): ...


def test_the_clock_of_a_worker_changes_nothing_where_the_server_has_one(schema: Any) -> None:
    """Two workers whose clocks are a day apart."""
    suite = OnPostgreSql()
    suite.schema = schema
    with suite.inbox() as inbox, InboxDriver(suite.engine(), FakeClock(inbox.clock() + 86_400)) as ahead:
        suite.abandon(inbox, contract(), event("e1"))
        assert ahead.is_busy(contract(), event("e1"), never), "the lease has not expired"
        suite.advance(inbox, 61)
        assert ahead.process(contract(), event("e1"), write).handling is Handling.DONE
