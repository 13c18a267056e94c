"""A PostgreSQL that is frozen: no connection breaks, and nothing is answered."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from onceward import Onceward
from onceward.db.calls import AnswerWatch, DatabaseCalls
from onceward.run.worker import watch_database
from tests.support.own_postgres import own_postgres
from tests.support.run.world import Site
from tests.support.wait import until


@pytest.mark.req("RN-14")
@pytest.mark.parametrize("mode", ["threads", pytest.param("asyncio", marks=pytest.mark.long)])
def test_a_run_is_not_ready_while_its_database_is_frozen(tmp_path: Path, mode: str) -> None:
    site = Site(tmp_path, mode)
    with own_postgres() as server, site.run("--health", "127.0.0.1:0", ONCEWARD_DATABASE=server.url) as run:
        until(run.is_ready)
        server.signal_all(signal.SIGSTOP)
        try:
            until(lambda: not run.is_ready())
            status, problems = run.get("/readyz")
            assert status == 503
            assert "worker 1: the database does not answer: " in problems
            assert run.get("/livez")[0] == 200
        finally:
            server.signal_all(signal.SIGCONT)
        until(run.is_ready)
        assert len(run.workers()) == 1
        run.kill()
        server.control("stop", "-m", "immediate")


QUEUE_ONLY = """
import os
from onceward import Onceward

app = Onceward("shop", database=os.environ.get("DATABASE"))


@app.consumer(os.environ["SOURCE"], contract=None)
{} note(order: dict) -> None: ...
"""


@pytest.mark.req("RN-14", "RN-15")
@pytest.mark.parametrize("kind", ["def", pytest.param("async def", marks=pytest.mark.long)])
def test_a_run_is_not_ready_while_its_queue_is_frozen_and_ends_without_its_answer(
    tmp_path: Path, kind: str
) -> None:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(QUEUE_ONLY.format(kind))
    with own_postgres() as server:
        source = f"{server.plain_url}&queue=orders"
        with site.run("--health", "127.0.0.1:0", ONCEWARD_GRACE="120", SOURCE=source) as run:
            with create_engine(server.url).connect() as connection:
                until(lambda: "onceward_queue_messages" in inspect(connection).get_table_names())
            until(run.is_ready)
            server.signal_all(signal.SIGSTOP)
            try:
                until(lambda: not run.is_ready())
                status, problems = run.get("/readyz")
                assert status == 503
                assert "that has a queue does not answer: " in problems
                run.signal(signal.SIGTERM)
                assert run.process.wait(30) == 0, "nothing was in flight"
            finally:
                server.signal_all(signal.SIGCONT)
        server.control("stop", "-m", "immediate")


@contextmanager
def long_call(url: str, calls: DatabaseCalls) -> Iterator[None]:
    """A statement that takes long on a server that answers other connections."""
    engine = create_engine(url)
    calls.watch(engine)
    connection = engine.connect()
    pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()

    def run() -> None:
        with pytest.raises(Exception, match="canceling"):
            connection.execute(text("SELECT pg_sleep(60)"))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        with engine.connect() as other:
            other.execute(text(f"SELECT pg_cancel_backend({pid})"))
        thread.join()
        connection.close()
        engine.dispose()


@pytest.mark.req("RN-14")
def test_a_statement_that_takes_long_is_no_reason_to_be_unready(postgres_url: str) -> None:
    calls, asked = DatabaseCalls(), 0
    app = Onceward("shop", database=postgres_url, database_answers_within=0.1)
    [real] = watch_database(app).values()

    def ask() -> None:
        nonlocal asked
        real._ask()
        asked += 1

    watch = AnswerWatch(ask, 0.1, calls)
    with long_call(postgres_url, calls):
        until(lambda: (watch.look(), asked)[1])
        assert watch.problem is None
    assert calls.oldest() is None
