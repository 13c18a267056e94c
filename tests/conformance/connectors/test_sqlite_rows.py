"""Rows of a SQLite queue that another program wrote or changed: SQLite stores any value in any column."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

from onceward.connectors import DeadMessage, SqliteConnector
from onceward.connectors.sqlite.scheme import counts
from onceward.connectors.urls import Address
from onceward.deadletters import DeadLetters
from onceward.deadletters.burial import LARGEST_COUNT, burial_of_dead
from onceward.testing.connectors import FakeClock
from onceward.transaction import Settlement, Transaction, Verdict

NOT_TEXT = "CAST(x'ff00fe' AS TEXT)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


def execute(path: Path, *statements: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection, connection:
        for each in statements:
            rows = connection.execute(each).fetchall()
    return rows


def settle_all(queue: SqliteConnector) -> list[str]:
    """Fetch one at a time, so each row gets its turn; return the ids in order."""
    done = []
    while batch := queue.fetch_transactions(1):
        queue.settle_transactions([Settlement(each, Verdict.DONE) for each in batch])
        done += [each.id for each in batch]
    return done


@pytest.mark.req("CN-04")
@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("'hello'", b"hello"),
        ("''", b""),
        (NOT_TEXT, b"\xff\x00\xfe"),
        ("7", b"7"),
        ("1.5", b"1.5"),
        ("x''", b""),
    ],
)
def test_a_body_that_is_not_bytes_is_a_dead_letter_and_holds_up_nothing(
    path: Path, value: str, kept: bytes
) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction(f"t-{n}") for n in range(3)])
        execute(path, f"UPDATE messages SET body = {value} WHERE seq = 1")
        assert settle_all(queue) == ["t-1", "t-2"]
        [dead] = queue.dead_letters()
        assert (dead.reason, dead.body, dead.transaction) == ("undecodable", kept, None)
        queue.forget_dead([dead.key])
        assert queue.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}
    accounts = counts(Address(f"sqlite:///{path}"))
    assert (accounts.appended, accounts.done, accounts.moved) == (3, 2, 1)


@pytest.mark.req("CN-04")
def test_a_null_body_is_a_dead_letter(path: Path) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("first"), Transaction("second")])
    execute(
        path,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = replace(sql, 'body BLOB NOT NULL', 'body BLOB') WHERE name = 'messages'",
    )
    execute(path, "UPDATE messages SET body = NULL WHERE seq = 1")
    with SqliteConnector(path) as queue:
        assert settle_all(queue) == ["second"]
        assert [each.body for each in queue.dead_letters()] == [b""]


@pytest.mark.req("CN-04")
def test_text_that_spells_a_transaction_is_delivered(path: Path) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("as-text")])
        execute(path, "UPDATE messages SET body = CAST(body AS TEXT)")
        assert settle_all(queue) == ["as-text"]


@pytest.mark.req("CN-04")
@pytest.mark.parametrize("value", ["'soon'", NOT_TEXT, "x'00'", "-5", "-1e300"])
@pytest.mark.parametrize("column", ["visible_at", "deliveries", "lost", "token", "enqueued_at", "history"])
def test_no_value_of_another_column_hides_a_message_or_those_behind_it(
    path: Path, column: str, value: str
) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("odd"), Transaction("next")])
        execute(path, f"UPDATE messages SET {column} = {value} WHERE seq = 1")
        assert sorted(settle_all(queue)) == ["next", "odd"]
        assert queue.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


@pytest.mark.req("CN-04")
def test_a_negative_number_of_deliveries_gives_no_more_than_allowed(path: Path) -> None:
    clock = FakeClock()
    with SqliteConnector(path, max_deliveries=2, lease=5, clock=clock.now) as queue:
        queue.dispatch_transactions([Transaction("odd")])
        execute(path, "UPDATE messages SET deliveries = -100")
        for _ in range(2):
            assert len(queue.fetch_transactions(1)) == 1
            clock.advance(10)
        assert queue.fetch_transactions(1) == []
        assert [each.reason for each in queue.dead_letters()] == ["max_deliveries"]


@pytest.mark.req("CN-04")
@pytest.mark.parametrize("token", ["'mine'", NOT_TEXT, "x'00'"])
def test_an_odd_token_on_an_odd_body_does_not_block_the_queue(path: Path, token: str) -> None:
    with SqliteConnector(path) as queue:
        queue.dispatch_transactions([Transaction("odd"), Transaction("next")])
        execute(path, f"UPDATE messages SET body = 'hello', visible_at = 1, token = {token} WHERE seq = 1")
        assert settle_all(queue) == ["next"]
        assert len(queue.dead_letters()) == 1


@pytest.mark.req("CN-04")
@pytest.mark.parametrize("value", ["'odd'", NOT_TEXT, "x'00'", "-1", "9e999", "1e30"])
@pytest.mark.parametrize(
    "column",
    [
        "transaction_id",
        "reason",
        "category",
        "error",
        "deliveries",
        "enqueued_at",
        "died_at",
        "body",
        "history",
    ],
)
def test_no_value_of_a_dead_letter_hides_it_or_those_behind_it(path: Path, column: str, value: str) -> None:
    with SqliteConnector(path, on_failure="dead_letter") as queue:
        queue.dispatch_transactions([Transaction("odd"), Transaction("next")])
        queue.settle_transactions([Settlement(each, Verdict.FAILED) for each in queue.fetch_transactions(2)])
        execute(path, f"UPDATE dead_letters SET {column} = {value} WHERE seq = 1")
        letters: list[DeadMessage] = queue.dead_letters()
        assert len(letters) == 2
        assert letters[1].transaction_id == "next"
        assert letters[0].deliveries >= 0
        assert letters[0].died_at >= datetime.fromtimestamp(0, UTC) or value == "-1"
        counts(Address(f"sqlite:///{path}"))


@pytest.mark.req("CN-04")
@pytest.mark.parametrize("deliveries", [10**9, 2**63 - 1])
@pytest.mark.parametrize("body", ["body", "'hello'"], ids=["readable", "not readable"])
def test_a_claimed_number_of_deliveries_does_not_keep_dead_letters_from_their_store(
    path: Path, deliveries: int, body: str
) -> None:
    with SqliteConnector(path, max_deliveries=2) as queue:
        queue.dispatch_transactions([Transaction("odd")])
        execute(path, f"UPDATE messages SET deliveries = {deliveries}, body = {body}")
        assert settle_all(queue) == []
        [dead] = queue.dead_letters()
    engine = create_engine("sqlite://", poolclass=StaticPool)
    letters = DeadLetters(engine)
    letters.migrate()
    letters.bury(burial_of_dead(dead, consumer="c", origin="o"))
    [letter] = letters.find()
    assert letter.attempts == min(deliveries, LARGEST_COUNT)
    assert len(letter.history) <= 100
    engine.dispose()
