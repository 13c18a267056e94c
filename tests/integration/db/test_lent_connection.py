"""Code that gets the connection by `session.run` and ends the transaction: the session notices, whatever follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from onceward import Transaction
from onceward.db import SessionError
from onceward.db.statement import ENDS_ITSELF
from onceward.inbox import Contract, Inbox
from onceward.inbox.ports import BlockingInboxPorts
from tests.support.schema import new_schema

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

ADD = "INSERT INTO items (id) VALUES ({})"
CONTRACT = Contract(consumer_id="lent", event_types=["*"], owner_team="t", idempotency_mechanism="inbox")


def _sql(*texts: str) -> Callable[[Any], None]:
    def run(own: Any) -> None:
        for each in texts:
            own.connection.exec_driver_sql(each)

    return run


def _driver(*names: str) -> Callable[[Any], None]:
    """Calls of the connection that the pool lends, and statements, past SQLAlchemy."""

    def run(own: Any) -> None:
        lent = own.connection.connection
        for each in names:
            if " " in each:
                lent.cursor().execute(each)
            else:
                getattr(lent, each)()

    return run


REFUSED: dict[str, Callable[[Any], None]] = {
    "COMMIT": _sql("COMMIT"),
    "ROLLBACK": _sql("ROLLBACK"),
    "hidden": _sql(f"{ADD.format(5)}; commit"),
}
"""These never reach the driver."""
NOTICED: dict[str, Callable[[Any], None]] = {
    "rollback": lambda own: own.connection.rollback(),
    "rollback, and more": lambda own: (own.connection.rollback(), _sql(ADD.format(6))(own)),
    "driver's rollback": _driver("rollback"),
    "driver's commit": _driver("commit"),
    "driver's, and more": _driver("rollback", ADD.format(6)),
}
COMMIT: Callable[[Any], None] = lambda own: own.connection.commit()  # noqa: E731
ALL = REFUSED | NOTICED | {"commit": COMMIT}


@pytest.fixture
def items(database: Database) -> Database:
    database.do("CREATE TABLE items (id INTEGER PRIMARY KEY)")
    return database


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/inbox.db"
        return
    with new_schema(request.getfixturevalue("postgres_url")) as schema:
        yield schema.plain_url


def ids(database: Database) -> list[int]:
    with database.session() as session:
        return [row["id"] for row in session.fetch_all("SELECT id FROM items ORDER BY id")]


def attempt(session: Any, *steps: Any) -> None:
    """Run statements and functions in a session, and catch what they raise."""
    with session:
        for step in steps:
            with suppress(SessionError):
                session.execute(step) if isinstance(step, str) else session.run(step)


@pytest.mark.req("IN-24")
def test_a_session_does_not_commit_after_code_has_ended_its_transaction(items: Database) -> None:
    for name, end in (NOTICED | {"commit": COMMIT}).items():
        session = items.session()
        with pytest.raises(SessionError) as raised:
            attempt(session, ADD.format(1), end, ADD.format(2))
        expected = ENDS_ITSELF if end is COMMIT else "the transaction has ended before its session"
        assert expected in str(raised.value)
        assert not session.committed
        assert ids(items) == ([1] if name == "driver's commit" else []), name
        items.do("DELETE FROM items")


@pytest.mark.req("IN-24")
def test_a_session_commits_everything_if_the_statement_was_refused(items: Database) -> None:
    with items.session() as session:
        session.execute(ADD.format(1))
        for end in REFUSED.values():
            with pytest.raises(SessionError, match="begins and ends its transaction itself"):
                session.run(end)
        session.execute(ADD.format(2))
    assert ids(items) == [1, 2]


@pytest.mark.req("IN-24")
def test_a_part_of_a_transaction_whose_code_ends_it_takes_all_with_it(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE items (id INTEGER)")
    for name, end in ALL.items():
        ports = BlockingInboxPorts(engine)
        whole = ports.whole()
        with suppress(SessionError), whole:
            for number in range(3):
                part = ports.part(whole, number)
                part.port.open_part()
                with suppress(SessionError):
                    part.execute(ADD.format(number))
                    part.run(end) if number == 1 else None
                part.port.end_at_once(None) or part.port.__exit__(None, None, None)
        with engine.begin() as connection:
            found = connection.exec_driver_sql("DELETE FROM items").rowcount
        assert whole.committed == (name in REFUSED), name
        assert found == {"driver's commit": 2}.get(name, 3 if name in REFUSED else 0), name
    engine.dispose()


@pytest.mark.req("IN-24")
def test_savepoints_of_every_kind_work_with_a_lent_connection(items: Database) -> None:
    nested: list[Any] = []
    with items.session() as session:
        session.execute("SAVEPOINT mine")
        session.execute(ADD.format(1))
        session.run(_sql(ADD.format(2)))
        session.execute("ROLLBACK TO SAVEPOINT mine")
        session.run(lambda own: nested.append(own.connection.begin_nested()))
        session.execute(ADD.format(3))
        session.run(lambda _: nested[0].rollback())
        session.run(lambda own: own.connection.begin_nested())
        assert session.insert_idempotent("items", {"id": 4})
        assert not session.insert_idempotent("items", {"id": 4})
    assert ids(items) == [4]


@pytest.mark.req("IN-24")
def test_an_error_that_the_function_swallows_is_no_silent_rollback(items: Database) -> None:
    def swallow(own: Any) -> None:
        try:
            own.connection.exec_driver_sql("no sql")
        except DBAPIError:
            return

    if items.is_sqlite:  # where an error undoes only its own statement
        with items.session() as session:
            session.execute(ADD.format(1))
            session.run(swallow)
        assert ids(items) == [1]
        return
    with pytest.raises(SessionError, match="a statement failed"):
        attempt(items.session(), ADD.format(1), swallow)
    assert ids(items) == []


@pytest.mark.req("IN-24")
def test_the_inbox_never_says_done_after_code_has_ended_its_transaction(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE items (id INTEGER)")
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(CONTRACT)
    for name, end in ALL.items():
        transaction = Transaction(payload={"a": 1}, metadata={"event_type": "x"})

        def handle(event: Any, session: Any, end: Any = end) -> None:
            session.execute(ADD.format(1))
            session.run(end)
            session.execute(ADD.format(2))

        with pytest.raises(SessionError):
            inbox.process(CONTRACT, transaction, handle)
        with engine.begin() as connection:
            found = connection.exec_driver_sql("DELETE FROM items").rowcount
        assert found == (1 if name == "driver's commit" else 0), name
    engine.dispose()
