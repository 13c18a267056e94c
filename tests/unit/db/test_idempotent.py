"""`insert_idempotent`: True if inserted, False if already there; raises for anything else."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, column, table
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward.db import AsyncDbSession, DbSession
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

INBOX = Table(
    "inbox",
    MetaData(),
    Column("consumer", String, primary_key=True),
    Column("tracking", String, primary_key=True),
    Column("serial", Integer, unique=True),
    Column("body", String, nullable=False, server_default="-"),
)


class Base(DeclarativeBase):
    pass


class Inbox(Base):
    __tablename__ = "inbox"
    consumer: Mapped[str] = mapped_column(primary_key=True)
    tracking: Mapped[str] = mapped_column(primary_key=True)
    serial: Mapped[int]


@pytest.fixture
def inbox(database: Database) -> Database:
    database.do(
        """CREATE TABLE inbox (
            consumer TEXT, tracking TEXT, serial INTEGER UNIQUE,
            body TEXT NOT NULL DEFAULT '-' CHECK (body <> 'bad'),
            PRIMARY KEY (consumer, tracking)
        )"""
    )
    return database


ROW = {"consumer": "shop", "tracking": "t1", "serial": 1}


WAYS_TO_NAME_IT: list[Any] = ["inbox", INBOX, table("inbox", column("consumer")), Inbox]


def test_the_first_insert_is_true_and_the_second_is_false(inbox: Database) -> None:
    for number, where in enumerate(WAYS_TO_NAME_IT):
        row = {**ROW, "tracking": f"t{number}", "serial": number}
        with inbox.session() as session:
            assert session.insert_idempotent(where, row) is True
            assert session.insert_idempotent(where, row) is False
        with inbox.session() as session:
            assert session.insert_idempotent(where, row) is False
    assert inbox.scalar("SELECT count(*) FROM inbox") == 4


def test_a_duplicate_leaves_the_transaction_around_it_intact(inbox: Database) -> None:
    inbox.do("CREATE TABLE effects (id INTEGER)")
    with inbox.session() as session:
        session.execute("INSERT INTO effects VALUES (1)")
        session.insert_idempotent("inbox", ROW)
        assert session.insert_idempotent("inbox", ROW) is False
        session.execute("INSERT INTO effects VALUES (2)")
    assert inbox.scalar("SELECT count(*) FROM effects") == 2
    assert inbox.scalar("SELECT count(*) FROM inbox") == 1


def test_an_insert_is_undone_with_its_session(inbox: Database) -> None:
    with pytest.raises(ZeroDivisionError), inbox.session() as session:  # noqa: PT012
        assert session.insert_idempotent("inbox", ROW) is True
        raise ZeroDivisionError
    with inbox.session() as session:
        assert session.insert_idempotent("inbox", ROW) is True


def test_any_other_integrity_error_is_raised_and_the_session_can_go_on(inbox: Database) -> None:
    with inbox.session() as session:
        for body in (None, "bad"):  # NOT NULL, CHECK
            with pytest.raises(IntegrityError):
                session.insert_idempotent("inbox", {**ROW, "body": body})
        assert session.insert_idempotent("inbox", ROW) is True
    assert inbox.scalar("SELECT count(*) FROM inbox") == 1


def test_a_violated_foreign_key_is_raised(postgresql: Database) -> None:
    postgresql.do("CREATE TABLE a (id INTEGER PRIMARY KEY)", "CREATE TABLE b (id INTEGER REFERENCES a (id))")
    with pytest.raises(IntegrityError), postgresql.session() as session:
        session.insert_idempotent("b", {"id": 1})


def test_an_exclusion_is_not_a_duplicate(postgresql: Database) -> None:
    postgresql.do("CREATE TABLE stays (days int4range, EXCLUDE USING gist (days WITH &&))")
    postgresql.do("INSERT INTO stays VALUES ('[1,5)')")
    with pytest.raises(IntegrityError), postgresql.session() as session:
        session.insert_idempotent("stays", {"days": "[3,9)"})


# ── with key columns ────────────────────────────────────────────────────────────────────────────────────

KEY = ["consumer", "tracking"]


def test_with_a_key_only_that_key_counts_as_there_already(inbox: Database) -> None:
    with inbox.session() as session:
        assert session.insert_idempotent("inbox", ROW, key=KEY) is True
        assert session.insert_idempotent("inbox", {**ROW, "serial": 2}, key=KEY) is False
        with pytest.raises(IntegrityError):
            session.insert_idempotent("inbox", {**ROW, "tracking": "t2"}, key=KEY)
        assert session.insert_idempotent("inbox", {**ROW, "tracking": "t2"}, key="serial") is False
        assert session.insert_idempotent("inbox", {**ROW, "tracking": "t2"}) is False
    assert inbox.scalar("SELECT count(*) FROM inbox") == 1


def test_null_in_a_key_is_never_there_already(inbox: Database) -> None:
    with inbox.session() as session:
        session.insert_idempotent("inbox", {**ROW, "serial": None})
        with pytest.raises(IntegrityError):
            session.insert_idempotent("inbox", {**ROW, "serial": None}, key=["serial"])


def test_a_key_that_is_no_part_of_the_row_is_refused(inbox: Database) -> None:
    with inbox.session() as session:
        for key in (["body"], [], ["nope", "consumer"]):
            with pytest.raises(ConfigurationError, match="key columns"):
                session.insert_idempotent("inbox", ROW, key=key)


def test_a_unique_index_over_some_rows_counts_too(inbox: Database) -> None:
    inbox.do("CREATE UNIQUE INDEX only_open ON inbox (consumer) WHERE body = 'open'")
    with inbox.session() as session:
        first = {"consumer": "shop", "tracking": "t1", "body": "open"}
        assert session.insert_idempotent("inbox", first, key=["consumer"]) is True
        assert session.insert_idempotent("inbox", {**first, "tracking": "t2"}, key=["consumer"]) is False


# ── names and races ─────────────────────────────────────────────────────────────────────────────────────


def test_names_are_quoted(database: Database) -> None:
    hostile = 'or"der; DROP TABLE x'
    quoted = hostile.replace('"', '""')
    database.do(f'CREATE TABLE "{quoted}" ("select" INTEGER PRIMARY KEY, "Mixed Case" TEXT)')
    with database.session() as session:
        assert session.insert_idempotent(hostile, {"select": 1, "Mixed Case": "x"}, key=["select"]) is True
        assert session.insert_idempotent(hostile, {"select": 1, "Mixed Case": "x"}, key=["select"]) is False


def test_what_is_no_table_or_no_column_is_refused(inbox: Database) -> None:
    with inbox.session() as session:
        with pytest.raises(ConfigurationError, match="a table is a name"):
            session.insert_idempotent(7, ROW)
        with pytest.raises(ConfigurationError, match="inbox has no column nope"):
            session.insert_idempotent(INBOX, {"nope": 1})


def test_of_many_at_once_exactly_one_inserts(inbox: Database) -> None:
    if inbox.asynchronous:
        outcomes = inbox.run(_many_tasks(inbox, 8))
    else:
        start = threading.Barrier(8)

        def attempt(_: int) -> bool:
            start.wait()
            with DbSession(inbox.default) as session:
                return session.insert_idempotent("inbox", ROW, key=KEY)

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(attempt, range(8)))
    assert sorted(outcomes) == [False] * 7 + [True]


async def _many_tasks(inbox: Database, count: int) -> list[bool]:
    async def attempt() -> bool:
        async with AsyncDbSession(inbox.default) as session:
            return await session.insert_idempotent("inbox", ROW, key=KEY)

    return await asyncio.gather(*(attempt() for _ in range(count)))
