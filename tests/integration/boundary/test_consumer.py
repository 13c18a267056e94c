"""The boundary consumer: fetch, apply, persist, confirm. In that order, whole batches, nothing swallowed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, IntegrityError

from onceward.boundary import AsyncBoundaryConsumer, BoundaryClient, envelope_for, fact_of
from onceward.boundary.errors import Unavailable
from onceward.boundary.model import Gap
from onceward.boundary.strategies import OncePerId, idempotent_outcome
from onceward.db import LockTimeoutError
from onceward.errors import ConfigurationError
from tests.support import ROOT
from tests.support.boundary.consumer_world import NAME, Awaited, BoundaryWorld, book, meanwhile
from tests.support.silence import once
from tests.support.wait import until, until_async

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

SERVER = "tests.support.boundary.consumer_server"
DAY_MS = 86_400_000


@pytest.fixture
def world(sqlite: Database, tmp_path: Path) -> Iterator[BoundaryWorld]:
    with BoundaryWorld(sqlite, tmp_path) as made:
        yield made


@pytest.fixture
def anywhere(database: Database, tmp_path: Path) -> Iterator[BoundaryWorld]:
    """On SQLite and on PostgreSQL."""
    with BoundaryWorld(database, tmp_path) as made:
        yield made


class Odd(Exception):
    pass


# ── the order of steps ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-04")
def test_every_fact_is_committed_before_the_one_confirm_of_its_batch(world: BoundaryWorld) -> None:
    world.append(1, 2, 3, 4, 5)
    world.server.calls.clear()
    commits: list[int] = []
    event.listen(world.database.plain(), "commit", lambda _: commits.append(len(world.server.calls)))
    seen_at_confirm: list[int] = []

    def look(name: str) -> None:
        if name == "confirm":
            with closing(sqlite3.connect(world.database.plain().url.database or "")) as connection:
                [count] = connection.execute("SELECT count(*) FROM effects").fetchone()
            seen_at_confirm.append(count)

    world.server.on_call = look
    world.consume(book, limit=3)
    assert world.server.calls == [
        ("fetch", NAME, 3), ("confirm", NAME, 3), ("fetch", NAME, 3), ("confirm", NAME, 5), ("fetch", NAME, 3)
    ]  # fmt: skip
    assert commits == [1, 1, 1, 3, 3], "one transaction per fact, after its fetch and before its confirm"
    assert seen_at_confirm == [3, 5], "another connection sees the outcomes when the confirm arrives"
    assert world.effects() == [1, 2, 3, 4, 5]


def test_a_restart_goes_on_after_what_was_confirmed_and_another_name_has_its_own_cursor(
    world: BoundaryWorld,
) -> None:
    world.append(1, 2)
    world.consume(book)
    world.server.stop()
    world.server.start()
    world.append(3)
    world.consume(book)
    assert world.effects() == [1, 2, 3]
    seen: list[int] = []

    async def look(fact: Any, _: Awaited) -> None:
        seen.append(fact.offset)

    world.consume(look, name="another")
    assert seen == [1, 2, 3]


@pytest.mark.req("BC-14")
def test_facts_from_long_ago_and_from_the_future_are_processed_like_fresh_ones(world: BoundaryWorld) -> None:
    now_ms = time.time_ns() // 1_000_000
    times = {
        1: now_ms,
        2: now_ms - 3_600_000,
        3: now_ms - 30 * DAY_MS,
        4: 1,
        5: now_ms + 365 * DAY_MS,
        6: now_ms,
    }
    for number, produced_at in times.items():
        world.append(number, produced_at_unix_ms=produced_at)
    world.consume(book)
    assert world.effects() == [1, 2, 3, 4, 5, 6]
    assert world.cursor() == 6


# ── a fact that fails ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-05")
def test_a_fact_that_fails_stops_its_batch_and_the_next_fetch_begins_at_the_same_facts(
    world: BoundaryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(1, 2, 3, 4, 5)
    touched: list[int] = []
    broken = True

    async def fragile(fact: Any, session: Awaited) -> None:
        touched.append(fact.offset)
        await book(fact, session)
        if fact.offset == 4 and broken:
            raise Odd("no")

    with caplog.at_level(logging.ERROR, "onceward.boundary"), pytest.raises(Odd, match="no") as caught:
        world.consume(fragile, limit=2)
    assert touched == [1, 2, 3, 4]
    assert world.effects() == [1, 2, 3], "4 is rolled back, and 5 was never touched"
    assert world.server.count("confirm") == 1, "of the first batch"
    assert world.cursor() == 2
    [note] = caught.value.__notes__
    assert "message-4" in note
    assert "offset 4" in note
    [record] = caplog.records
    assert (record.message_id, record.offset, record.consumer) == ("message-4", 4, NAME)  # type: ignore[attr-defined]
    assert "message-4" in record.getMessage()
    assert "offset 4" in record.getMessage()

    broken = False
    world.consume(fragile, limit=2)
    assert touched == [1, 2, 3, 4, 3, 4, 5], "the whole batch again, then the rest"
    assert world.cursor() == 5


async def unawaited(*_: Any) -> None: ...


def yielding(*_: Any) -> Iterator[None]:
    yield


async def yielding_async(*_: Any) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("handler", [yielding, yielding_async])
def test_a_handler_that_yields_is_refused_before_anything_is_fetched(
    world: BoundaryWorld, handler: Any
) -> None:
    world.append(1)
    world.server.calls.clear()
    with pytest.raises(ConfigurationError, match=r"the handler yielding.* has a `yield`"):
        world.consumer().run(handler, world.database.default, drain=True)
    for strategy in (OncePerId(NAME), idempotent_outcome("sets a level")):
        with pytest.raises(ConfigurationError, match=r"the handler yielding.* has a `yield`"):
            strategy(handler)
    assert world.server.calls == []


@pytest.mark.parametrize("guard", [lambda handler: handler, OncePerId(NAME)])
@pytest.mark.parametrize("make", [unawaited, yielding, yielding_async])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_fact_is_not_confirmed_if_its_handler_returns_before_it_has_run(
    world: BoundaryWorld, make: Any, guard: Any
) -> None:
    world.append(1)
    world.in_session(OncePerId(NAME).create_table)

    async def handle_async(*_: Any) -> Any:
        return make()

    def handle(*_: Any) -> Any:
        return make()

    handler = guard(handle_async if world.asynchronous else handle)
    with pytest.raises(TypeError, match="so its code has not run"):
        world.consumer().run(handler, world.database.default, drain=True)
    assert world.server.count("confirm") == 0


@pytest.mark.req("BC-05")
@pytest.mark.parametrize("kind", [Odd, KeyError, StopIteration, KeyboardInterrupt, SystemExit])
def test_what_a_handler_raises_leaves_run_as_the_same_object_and_nothing_is_confirmed(
    world: BoundaryWorld, kind: type[BaseException]
) -> None:
    if world.asynchronous and kind is not Odd and kind is not KeyError:
        kind = Odd  # Python itself converts StopIteration in a coroutine, and the others end the loop
    world.append(1)
    raised = kind("no")

    def fail(fact: Any, session: Any) -> None:
        raise raised

    async def fail_async(fact: Any, session: Any) -> None:
        raise raised

    with pytest.raises(kind) as caught:
        world.consumer().run(fail_async if world.asynchronous else fail, world.database.default)
    assert caught.value is raised
    assert world.server.names() == ["append", "fetch"]


@pytest.mark.req("BC-19")
def test_a_commit_that_fails_leaves_the_batch_unconfirmed_and_the_whole_of_it_is_retried(
    anywhere: BoundaryWorld,
) -> None:
    database = anywhere.database
    engine = database.engine()
    if database.is_sqlite:
        event.listen(
            database.plain(engine), "connect", lambda driver, _: driver.execute("PRAGMA foreign_keys = ON")
        )
    database.do(
        "CREATE TABLE known (number INTEGER PRIMARY KEY)",
        "CREATE TABLE checked (number INTEGER REFERENCES known DEFERRABLE INITIALLY DEFERRED)",
    )
    anywhere.append(1, 2, 3)
    applied: list[int] = []

    async def check(fact: Any, session: Awaited) -> None:
        applied.append(fact.offset)
        await session.execute("DELETE FROM checked WHERE number = :number", fact.fact.object)
        await session.execute("INSERT INTO checked (number) VALUES (:number)", fact.fact.object)

    database.do("INSERT INTO known (number) VALUES (1), (3)")
    with pytest.raises(IntegrityError) as caught:
        anywhere.consumer().run(anywhere.handler(check), engine, drain=True)
    assert "offset 2" in caught.value.__notes__[-1]
    assert anywhere.server.count("confirm") == 0
    assert applied == [1, 2], "the commit failed, not the handler"

    database.do("INSERT INTO known (number) VALUES (2)")
    anywhere.consumer().run(anywhere.handler(check), engine, drain=True)
    assert applied == [1, 2, 1, 2, 3]
    assert database.scalar("SELECT count(*) FROM checked") == 3
    assert anywhere.cursor() == 3


@pytest.mark.req("BC-19")
def test_a_database_that_is_gone_leaves_the_batch_unconfirmed_and_after_recovery_it_is_retried_whole(
    anywhere: BoundaryWorld,
) -> None:
    database = anywhere.database
    once = OncePerId(NAME)
    anywhere.in_session(once.create_table)
    anywhere.append(1, 2, 3)
    applied: list[int] = []
    down = True
    engine = database.engine(connect_args={"timeout": 0.05} if database.is_sqlite else {})
    held: list[sqlite3.Connection] = []

    async def fragile(fact: Any, session: Awaited) -> None:
        applied.append(fact.offset)
        await book(fact, session)
        if not down or fact.offset != 2:
            return
        if not database.is_sqlite:
            await session.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    def hold_the_file(*_: object) -> None:
        """Another process takes SQLite's only lock after the first fact."""
        if (
            database.is_sqlite
            and down
            and anywhere.server.count("fetch") == 1
            and applied == [1]
            and not held
        ):
            held.append(sqlite3.connect(database.plain(engine).url.database or "", check_same_thread=False))
            held[0].execute("BEGIN EXCLUSIVE")

    event.listen(database.plain(engine), "checkin", hold_the_file)
    handler = once(anywhere.handler(fragile))
    with pytest.raises((LockTimeoutError, DBAPIError)):
        anywhere.consumer().run(handler, engine, drain=True)
    assert anywhere.server.count("confirm") == 0
    assert anywhere.cursor() == 0

    down = False
    for connection in held:
        connection.close()
    assert anywhere.effects() == [1]
    anywhere.consumer().run(handler, engine, drain=True)
    assert anywhere.effects() == [1, 2, 3], "the whole batch came again, and 1 was known"
    assert anywhere.cursor() == 3
    assert anywhere.server.calls.count(("confirm", NAME, 3)) == 1


def test_an_engine_or_a_handler_of_the_wrong_kind_is_an_error_and_loses_nothing(world: BoundaryWorld) -> None:
    world.append(1)

    def handle(fact: Any, session: Any) -> None: ...

    async def handle_async(fact: Any, session: Any) -> None: ...

    wrong, error = (handle, TypeError) if world.asynchronous else (handle_async, ConfigurationError)
    with pytest.raises(error, match="`async def`"):
        world.consumer().run(wrong, world.database.default)
    assert not world.cursor()
    before = world.server.count("fetch")
    with pytest.raises(ConfigurationError, match="Engine"):
        world.consumer().run(handle, "sqlite://")
    assert world.server.count("fetch") == before, "it is refused before anything is fetched"


@pytest.mark.parametrize(
    ("changes", "reported"),
    [({"name": ""}, "durable name"), ({"limit": 0}, "limit"), ({"empty_wait": 0}, "empty_wait")],
)
def test_a_consumer_that_cannot_work_is_refused(
    world: BoundaryWorld, changes: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ConfigurationError, match=reported):
        world.consumer(**changes)


# ── a boundary that fails ───────────────────────────────────────────────────────────────────────────────


def test_a_confirm_whose_answer_is_lost_is_raised_and_nothing_comes_again_or_goes_back(
    world: BoundaryWorld,
) -> None:
    world.append(1, 2, 3)
    world.server.losing["confirm"].append(Unavailable("the link was cut"))
    with pytest.raises(Unavailable, match="cut") as caught:
        world.consume(book, limit=2)
    assert "offset 2" in caught.value.__notes__[0]
    assert world.server.count("confirm") == 1, "every call is made once"
    assert world.client.confirm(NAME, 2) == 2, "confirming again changes nothing"
    world.consume(book, limit=2)
    assert world.client.confirm(NAME, 1) == 3, "the cursor never goes back"
    assert world.effects() == [1, 2, 3]


def test_a_boundary_that_is_away_is_an_error_of_run_and_a_new_run_goes_on(world: BoundaryWorld) -> None:
    world.append(1)
    world.server.stop()
    with pytest.raises(Unavailable, match=world.server.url):
        world.consume(book)
    world.server.start()
    world.consume(book)
    assert world.effects() == [1]


def expire(world: BoundaryWorld, before: int) -> None:
    world.server.stop()
    with closing(sqlite3.connect(world.server.directory / "boundary.db")) as connection, connection:
        connection.execute('DELETE FROM facts WHERE "offset" < ?', (before,))
        connection.execute("UPDATE removed SET through = max(through, ?)", (before - 1,))
    world.server.start()


def test_facts_that_expired_before_they_were_fetched_are_reported_in_the_log(
    world: BoundaryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.admin.fetch(NAME)
    world.append(1, 2, 3)
    expire(world, before=3)
    with caplog.at_level(logging.ERROR, "onceward.boundary"):
        world.consume(book)
    assert world.effects() == [3]
    assert f"consumer {NAME} missed facts 1 to 2" in caplog.text


@pytest.mark.req("BC-49")
def test_a_consumer_that_idles_behind_an_expired_log_reports_each_gap_once(
    world: BoundaryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.admin.fetch(NAME)
    world.append(1, 2, 3)
    expire(world, before=4)
    consumer = world.consumer(empty_wait=0.001)

    def watch(name: str) -> None:
        if world.server.count("fetch") == 10:
            consumer.thing.stop()

    world.server.calls.clear()
    world.server.on_call = watch
    with caplog.at_level(logging.WARNING, "onceward.boundary"):
        consumer.run(world.handler(book), world.database.default)
    said = [record.levelname for record in caplog.records if "missed facts 1 to 3" in record.getMessage()]
    assert sorted(said) == ["ERROR", "WARNING"], "the consumer and the server, once each"


@pytest.mark.req("BC-49")
def test_a_gap_that_grows_is_reported_by_its_new_part(
    world: BoundaryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.admin.fetch(NAME)
    world.append(1, 2)
    consumer = world.consumer()
    for number, before in ((3, 3), (4, 4)):
        expire(world, before)
        consumer.run(world.handler(_refuse if number == 3 else book), world.database.default, drain=True)
        world.append(number)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [each.partition(": ")[0] for each in errors] == [
        f"consumer {NAME} missed facts 1 to 2",
        f"consumer {NAME} missed facts 3 to 3",
    ]


async def _refuse(fact: Any, session: Awaited) -> None:
    raise AssertionError("there is no fact")


@pytest.mark.req("BC-49")
def test_a_new_name_begins_at_the_first_fact_that_is_there_and_has_missed_nothing(
    world: BoundaryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(1, 2, 3)
    expire(world, before=3)
    with caplog.at_level(logging.WARNING, "onceward.boundary"):
        assert world.admin.fetch("another").gap is None
        world.consume(book)
        expire(world, before=4)
        assert world.admin.fetch("a third").gap is None
    assert world.effects() == [3]
    assert "missed" not in caplog.text


@pytest.mark.req("BC-49")
def test_a_new_name_has_not_missed_what_was_gone_in_the_middle_of_the_log(
    world: BoundaryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(1, labels={"retention": "audit"})
    world.append(2, 3)
    world.append(4, labels={"retention": "audit"})
    world.append(5, labels={"retention": "documents"})
    world.append(6, labels={"retention": "audit"})
    world.server.ask(world.server.store.expire({"operational": 2**53}))
    assert world.admin.fetch("another").gap is None
    world.server.ask(world.server.store.expire({"documents": 2**53}))
    with caplog.at_level(logging.WARNING, "onceward.boundary"):
        world.consume(book)
    assert world.effects() == [1, 4, 6]
    assert "missed" not in caplog.text
    gaps = []
    for offset in (1, 4, 6):
        gaps.append(world.admin.fetch("another").gap)
        world.admin.confirm("another", offset)
    assert gaps == [None, None, Gap(5, 5)]


# ── pace ────────────────────────────────────────────────────────────────────────────────────────────────


def napping(consumer: Any, stop_after: int) -> list[float]:
    """The sleeps of a consumer, which take no time; it is stopped after this many."""
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == stop_after:
            consumer.thing.stop()

    consumer.thing._stop.pause = nap
    return naps


@pytest.mark.req("BC-11")
def test_an_empty_page_is_followed_by_a_wait_of_100_ms_and_no_confirm(world: BoundaryWorld) -> None:
    consumer = world.consumer()
    naps = napping(consumer, stop_after=3)
    consumer.run(world.handler(book), world.database.default)
    assert naps == [0.1, 0.1, 0.1]
    assert world.server.names() == ["fetch", "fetch", "fetch"]


@pytest.mark.req("BC-11")
def test_the_wait_can_be_set_and_a_stop_ends_it(world: BoundaryWorld) -> None:
    consumer = world.consumer(empty_wait=86_400.0)
    with once(world.server.names, consumer.thing.stop):
        consumer.run(world.handler(book), world.database.default)
    assert world.server.names() == ["fetch"]


@pytest.mark.req("BC-11")
def test_the_wait_really_takes_100_ms(world: BoundaryWorld) -> None:
    consumer = world.consumer()
    times: list[float] = []

    def note(name: str) -> None:
        times.append(time.monotonic())
        if len(times) == 3:
            consumer.thing.stop()

    world.server.on_call = note
    consumer.run(world.handler(book), world.database.default)
    assert all(later - earlier >= 0.099 for earlier, later in pairwise(times))


def test_stop_in_the_midst_of_a_batch_ends_after_the_fact_in_hand_and_confirms_nothing(
    world: BoundaryWorld,
) -> None:
    world.append(1, 2, 3)
    consumer = world.consumer()

    async def stop_at_two(fact: Any, session: Awaited) -> None:
        await book(fact, session)
        if fact.offset == 2:
            consumer.thing.stop()

    consumer.run(world.handler(stop_at_two), world.database.default)
    assert world.effects() == [1, 2]
    assert world.cursor() == 0
    consumer.run(world.handler(book), world.database.default)
    assert world.server.count("fetch") == 1, "a stopped consumer stays stopped"


def test_stop_in_the_last_fact_of_a_batch_still_confirms_it(world: BoundaryWorld) -> None:
    world.append(1, 2)
    consumer = world.consumer(limit=2)

    async def stop_at_two(fact: Any, session: Awaited) -> None:
        if fact.offset == 2:
            consumer.thing.stop()

    consumer.run(world.handler(stop_at_two), world.database.default)
    assert world.cursor() == 2


def test_stop_from_a_signal_ends_an_idle_run(world: BoundaryWorld) -> None:
    consumer = world.consumer(empty_wait=3600)
    before = signal.signal(signal.SIGTERM, lambda *_: consumer.thing.stop())

    def terminate() -> None:
        until(lambda: world.server.count("fetch"))
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        with meanwhile(terminate):
            consumer.run(world.handler(book), world.database.default)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_stop_from_another_thread_ends_an_idle_run(world: BoundaryWorld) -> None:
    consumer = world.consumer(empty_wait=3600)

    def stop() -> None:
        until(lambda: world.server.count("fetch"))
        consumer.thing.stop()

    with meanwhile(stop):
        consumer.run(world.handler(book), world.database.default)


@pytest.mark.parametrize("where", ["in a handler", "while waiting"])
@pytest.mark.without("threads")
def test_a_task_that_is_cancelled_ends_and_confirms_nothing(world: BoundaryWorld, where: str) -> None:
    if where == "in a handler":
        world.append(1)
    begun = asyncio.Event()

    async def hang(fact: Any, session: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def cancel() -> None:
        consumer: AsyncBoundaryConsumer = world.consumer(empty_wait=3600).thing
        task = asyncio.create_task(consumer.run(hang, world.database.default))
        if where == "in a handler":
            await begun.wait()
        else:
            await until_async(lambda: world.server.count("fetch"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    world.database.run(cancel())
    assert world.server.count("confirm") == 0


@pytest.mark.req("BC-10")
def test_the_boundary_opens_no_connection_and_a_consumer_that_pauses_finds_everything_later(
    tmp_path: Path,
) -> None:
    connections = tmp_path / "connections"
    command = [sys.executable, "-m", SERVER, str(tmp_path / "boundary"), str(connections)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()
        with BoundaryClient(url) as client:
            assert client.fetch(NAME).facts == (), "the boundary knows the consumer's name from now on"
            for number in (1, 2, 3):
                envelope = envelope_for(f"message-{number}", from_zone="a", to_zone="b")
                client.append(envelope, fact_of("batch:B1", "completed", {"number": number}))
            # While the consumer pauses, appends go on, and nothing is sent to it.
            assert [fact.offset for fact in client.fetch(NAME, 2).facts] == [1, 2]
            assert client.confirm(NAME, 2) == 2
            assert [fact.offset for fact in client.fetch(NAME).facts] == [3]
        process.stdin.close()
        assert process.wait(60) == 0
    assert connections.read_text() == "listening\n", "since it listens, it has opened no connection"
