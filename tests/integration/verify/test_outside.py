"""Calls to the outside world that take a detour: each is found, with its line, and nothing that is sent arrives."""

from __future__ import annotations

import inspect
import re
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, make_url, text

from onceward import Transaction
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.db import DbSession
from onceward.errors import ConfigurationError
from onceward.inbox import Event
from onceward.queue import QueueConfig, RedisStreamsQueue
from onceward.verify import ScenarioStatus, VerificationReport, examine_consumer
from onceward.verify.watch.outbound import NotInVerificationError
from tests.integration.verify.test_kit import failure_of, line_of
from tests.verification import consumers, outside
from tests.verification.consumers import EVENTS, contract, setup


def examine(consumer: Any, *only: str, **given: Any) -> VerificationReport:
    if not isinstance(consumer, type):
        effectful = "session.effect(" in inspect.getsource(consumer)
        given = {"contract": contract(mode="effectful" if effectful else "transactional"), **given}
    given = {"events": EVENTS[:1], "setup": setup, "seed": 7, "only": only, **given}
    return examine_consumer(consumer, **given)


@pytest.mark.usual(
    "sends",
    "dispatches_and_hides_it",
    "dispatches_in_a_thread",
    "takes_messages",
    "opens_another_session_async",
)
@pytest.mark.req("CC-060")
@pytest.mark.parametrize("handler", outside.THROUGH_US, ids=lambda each: each.__name__)
def test_a_call_through_our_own_classes_is_found_and_nothing_arrives(handler: Any) -> None:
    report = examine(handler, "outside-calls")
    assert line_of(handler, "# outside") in failure_of(report, "outside-calls")
    assert "the handler" in str(report["outside-calls"])
    assert not any(outside.sqlite_queue.counts().values())


@pytest.mark.req("CC-060")
def test_nothing_reaches_a_live_stream_over_connections_from_before(redis_url: str) -> None:
    with (
        redis.Redis.from_url(redis_url) as client,
        RedisStreamsConnector(client, "live") as connector,
        RedisStreamsQueue(client, QueueConfig("live-queue", "group", "name")) as queue,
    ):
        connector.dispatch_transactions([Transaction(payload="before")])

        def sends(event: Event, session: Any) -> None:
            outside.save(event, session)
            with suppress(NotInVerificationError):
                connector.dispatch_transactions([Transaction(payload="first")])
            with suppress(NotInVerificationError):
                queue.enqueue("second")
            with suppress(NotInVerificationError):
                connector.fetch_transactions(1)

        findings = examine(sends, "outside-calls")["outside-calls"].findings
        for call in ("connector.dispatch_transactions", "queue.enqueue", "connector.fetch_transactions"):
            assert line_of(sends, call) in [each.where for each in findings]
        assert (client.xlen("live"), client.exists("live-queue")) == (1, 0)
        assert len(connector.fetch_transactions(1)) == 1, "the parent's own connection works on"


@pytest.mark.req("CC-060")
def test_a_setup_sends_nothing_either() -> None:
    def setup_and_send(engine: Any) -> None:
        setup(engine)
        outside.sqlite_queue.dispatch_transactions([Transaction(payload="first")])

    with pytest.raises(ConfigurationError, match="A verification sends and takes no messages"):
        examine(consumers.Right, setup=setup_and_send)
    assert not any(outside.sqlite_queue.counts().values())


@pytest.mark.req("CC-060")
def test_sessions_on_another_database_may_read_and_connections_from_before_are_opened_again(
    postgres_url: str,
) -> None:
    engine = create_engine(make_url(postgres_url).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1

    def reads(event: Event, session: Any) -> None:
        with DbSession(engine) as other:
            assert other.execute_scalar("SELECT 1") == 1
        outside.save(event, session)

    report = examine(reads, "outside-calls")
    assert report.passed, str(report)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    engine.dispose()


@pytest.mark.usual(
    "calls_a_library_in_a_thread",
    "calls_in_a_task_group",
    "starts_a_process",
    "sends_over_an_open_connection",
)
@pytest.mark.req("CC-063")
@pytest.mark.parametrize("handler", outside.ELSEWHERE, ids=lambda each: each.__name__)
def test_a_call_in_another_thread_or_task_or_over_an_open_connection_is_found(handler: Any) -> None:
    report = examine(handler, "outside-calls")
    assert line_of(handler, "# outside") in failure_of(report, "outside-calls")
    outside.JOURNAL.flush()
    assert not (outside.FOLDER / "journal").read_text()


@pytest.mark.req("CC-063")
def test_files_and_processes_are_outside_even_if_nothing_is_written_to_them() -> None:
    findings = examine(outside.leaves_signs, "outside-calls")["outside-calls"].findings
    calls = ("os.mkfifo", "os.mknod", "os.chmod", "os.utime", "SIGURG")
    assert {each.where for each in findings} == {line_of(outside.leaves_signs, call) for call in calls}


@pytest.mark.usual("starts_a_thread", "registers_work", "creates_a_task")
@pytest.mark.req("CC-063")
@pytest.mark.parametrize("handler", outside.LEFT_RUNNING, ids=lambda each: each.__name__)
def test_what_a_handler_leaves_running_is_a_failure(handler: Any) -> None:
    report = examine(handler, "outside-calls")
    (finding,) = report["outside-calls"].findings
    assert finding.where == line_of(handler, "# outside")
    assert "nothing waits for it" in finding.text


@pytest.mark.req("CC-063")
def test_what_a_task_does_after_the_handler_has_returned_is_found() -> None:
    report = examine(outside.creates_a_task_that_calls, "outside-calls")
    assert line_of(outside.connect, "create_connection") in failure_of(report, "outside-calls")


@pytest.mark.req("CC-063")
@pytest.mark.parametrize(
    ("consumer", "step", "words"),
    [
        (outside.CallsOnSuccess, "handle_transaction_success", "connected a socket.*after the commit"),
        (outside.AsyncProducesOnSuccess, "handle_transaction_success", "sent messages to redis://"),
        (outside.WritesOnFailure, "handle_transaction_exception", "opened the file.*comes again"),
    ],
)
def test_a_call_in_the_step_after_the_handler_is_found(consumer: Any, step: str, words: str) -> None:
    report = examine(consumer, "exceptions", "outside-calls")
    text = failure_of(report, "outside-calls")
    assert re.search(f"{step} {words}", text)
    assert line_of(getattr(consumer, step), "# outside") in text


@pytest.mark.usual("calls_in_threads_as_an_effect", "computes_in_tasks", "only_looks_suspicious")
@pytest.mark.req("CC-060")
@pytest.mark.req("CC-063")
@pytest.mark.parametrize("handler", outside.CORRECT, ids=lambda each: each.__name__)
def test_a_correct_handler_is_not_suspected(handler: Any) -> None:
    only = ["exceptions", "duplicates-at-once", "outside-calls"]
    report = examine(handler, *only, allow=["127.0.0.1"])
    assert [report[name].result for name in only] == [ScenarioStatus.PASSED] * len(only), str(report)
    assert not any(outside.sqlite_queue.counts().values())


@pytest.mark.req("CC-063")
def test_a_directory_that_is_there_is_not_created(tmp_path: Path) -> None:
    def keeps(event: Event, session: Any) -> None:
        outside.save(event, session)
        tmp_path.mkdir(exist_ok=True)

    def creates(event: Event, session: Any) -> None:
        outside.save(event, session)
        (tmp_path / event.tracking_id).mkdir(exist_ok=True)  # outside

    assert examine(keeps, "outside-calls").passed
    assert line_of(creates, "# outside") in failure_of(examine(creates, "outside-calls"), "outside-calls")


class Posts:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.me = self  # only the garbage collector ends it

    def __del__(self) -> None:
        self.path.write_text("collected")  # outside


kept = Event


@pytest.mark.req("CC-063")
def test_what_finalizers_do_is_found(tmp_path: Path) -> None:
    def finalizes(event: Event, session: Any) -> None:
        outside.save(event, session)
        weakref.finalize(kept, (tmp_path / "a").write_text, "at the end")  # outside

    def leaves(event: Event, session: Any) -> None:
        outside.save(event, session)
        Posts(tmp_path / "b")

    def closes(event: Event, session: Any) -> None:
        outside.save(event, session)
        weakref.finalize(kept, len, "harmless")

    assert line_of(finalizes, "# outside") in failure_of(examine(finalizes, "outside-calls"), "outside-calls")
    assert line_of(Posts, "# outside") in failure_of(examine(leaves, "outside-calls"), "outside-calls")
    assert examine(closes, "outside-calls").passed
