"""PostgreSQL: an event that is buried in the moment between the snapshot of its admission and its lock."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from onceward.db import DbSession
from onceward.deadletters import DeadLetters, Status
from onceward.deadletters.burial import burial_of
from onceward.inbox import Event, Inbox
from tests.support.deadletters.world import contract, order
from tests.support.schema import new_schema
from tests.support.wait import until

pytestmark = pytest.mark.req("CC-059")

GATE = 4711
SLOW_LOCK = f"""
    CREATE FUNCTION pg_try_advisory_xact_lock(name bigint) RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_catalog.pg_advisory_xact_lock_shared({GATE});
        RETURN pg_catalog.pg_try_advisory_xact_lock(name);
    END $$
"""
WAITS = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = {GATE} AND NOT granted"


class Site:
    def __init__(self, engine: Engine, held_up: Engine) -> None:
        self.engine = engine
        self.letters = DeadLetters(engine)
        Inbox(engine).migrate()
        self.letters.migrate()
        self.inbox = Inbox(held_up)
        """Its locks are not tried before the gate is open."""

    def do(self, mode: str) -> None:
        promised = contract(mode="effectful" if mode == "effectful" else "transactional")
        self.inbox.register(promised)
        event = Event.of(order("e1"))
        if mode == "joined":
            with DbSession(self.inbox.engine) as session:
                session.execute("CREATE TABLE already_written (id text)")
                self.inbox.process(promised, event, lambda *_: None, session=session)
        else:
            self.inbox.process(promised, event, lambda *_: None)


@pytest.fixture
def site(postgres_url: str) -> Iterator[Site]:
    with new_schema(postgres_url) as schema:
        engine = create_engine(postgres_url, connect_args=schema.connect_args)
        with engine.begin() as connection:
            connection.exec_driver_sql(SLOW_LOCK)
        path = f"-c search_path={schema.name},pg_catalog"
        held_up = create_engine(postgres_url, connect_args={"options": path})
        yield Site(engine, held_up)
        engine.dispose()
        held_up.dispose()


@pytest.mark.parametrize("mode", ["transactional", "effectful", "joined"])
def test_its_commit_resolves_the_letter(site: Site, mode: str) -> None:
    with ThreadPoolExecutor(1) as threads, site.engine.connect() as gatekeeper:
        gatekeeper.exec_driver_sql(f"SELECT pg_advisory_lock({GATE})")
        done = threads.submit(site.do, mode)

        def is_waiting() -> Any:
            assert not done.done() or done.result() is None
            return gatekeeper.exec_driver_sql(WAITS).scalar_one()

        until(is_waiting)
        assert site.letters.bury(burial_of(order("e1"), consumer="billing", error="slow")) == 1
        gatekeeper.exec_driver_sql(f"SELECT pg_advisory_unlock({GATE})")
        done.result()
    [letter] = site.letters.find()
    assert letter.status is Status.RESOLVED
