"""SQLite ends the whole transaction after some errors. What follows must not commit without what came before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from onceward.inbox import Event, Inbox
from onceward.testing.inbox.samples import LONG_AGO, contract

AT_DEDUP = "CREATE TRIGGER broken BEFORE INSERT ON onceward_dedup"


class Once:
    """True the first time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked == 1


@pytest.fixture
def fails() -> Once:
    return Once()


@pytest.fixture
def engine(tmp_path: Path, fails: Once) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/inbox.db")

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        connection.create_function("fails", 0, fails)

    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE written (id TEXT)")
    yield engine
    engine.dispose()


def write(event: Event, session: Any) -> None:
    session.execute("INSERT INTO written VALUES (:id)", {"id": event.tracking_id})


def write_and_charge(event: Event, session: Any) -> None:
    session.effect("charge", lambda key: key)
    write(event, session)


@pytest.mark.req("CC-012")
@pytest.mark.parametrize("how", ["ROLLBACK", "ABORT"])
@pytest.mark.parametrize(("mode", "handler"), [("transactional", write), ("effectful", write_and_charge)])
def test_an_error_that_ends_the_transaction_records_nothing_as_done(
    engine: Engine, fails: Once, mode: Any, handler: Callable[..., None], how: str
) -> None:
    inbox = Inbox(engine)
    inbox.migrate()
    promised = contract(mode=mode)
    inbox.register(promised)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"{AT_DEDUP} WHEN fails() BEGIN SELECT RAISE({how}, 'disk I/O error'); END"
        )
    paid = Event(tracking_id="e1", event_type="order.paid", created_at=LONG_AGO, payload={"amount": 1})

    with pytest.raises(DBAPIError, match="disk I/O error"):
        inbox.process(promised, paid, handler)
    assert found(engine) == ([], [])

    inbox.process(promised, paid, handler)
    assert found(engine) == (["e1"], ["e1"])
    assert fails.asked > 1


@pytest.mark.req("CC-012")
def test_an_error_that_a_handler_raises_from_itself_is_a_failure_like_any_other(engine: Engine) -> None:
    inbox = Inbox(engine)
    inbox.migrate()
    promised = contract()
    inbox.register(promised)

    def fail(event: Event, session: Any) -> None:
        write(event, session)
        error = ValueError("no amount")
        raise error from error

    paid = Event(tracking_id="e1", event_type="order.paid", created_at=LONG_AGO, payload={"amount": 1})
    with pytest.raises(ValueError, match="no amount"):
        inbox.process(promised, paid, fail)
    assert found(engine) == ([], [])


def found(engine: Engine) -> tuple[list[str], list[str]]:
    with engine.connect() as connection:
        done = connection.execute(text("SELECT tracking_id FROM onceward_dedup")).scalars().all()
        return list(done), list(connection.execute(text("SELECT id FROM written")).scalars())
