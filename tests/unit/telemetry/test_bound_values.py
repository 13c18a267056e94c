"""Values of a failed statement in messages of the database's own code, and of user code."""

from __future__ import annotations

import json
import logging
import sqlite3
import uuid
from contextlib import closing
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError, IntegrityError

from onceward.task.lifecycle import text_of
from onceward.telemetry.bound_values import BoundValues
from onceward.telemetry.logs import JsonLines
from onceward.telemetry.redaction import format_error, scrub

pytestmark = pytest.mark.req("CC-146")

CARD = "4111111111111111"
INSERT = "INSERT INTO cards (card, owner) VALUES (?, ?)"

VALUES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=6, max_size=40),
    st.integers(min_value=10**5, max_value=10**30),
    st.decimals(min_value=10**5, max_value=10**12, places=2),
    st.uuids(),
    st.binary(min_size=6, max_size=20),
)
SHOWN: dict[str, Any] = {
    "plain": str,
    "repr": repr,
    "repr of the message": lambda value: repr(str(value))[1:-1],
    "quoted by SQL": lambda value: "'{}'".format(str(value).replace("'", "''")),
    "JSON": lambda value: json.dumps(str(value)),
    "upper case": lambda value: str(value).upper(),
}
BOUND: dict[str, Any] = {
    "positions": lambda value: (value, "ann"),
    "names": lambda value: {"card": value, "owner": "ann"},
    "many": lambda value: [("none", "bob")] * 50 + [(value, "ann")],
    "a list": lambda value: ([value], "ann"),
}
WRAPPED: dict[str, Any] = {
    "itself": lambda error: error,
    "text": lambda error: ValueError(f"payment failed: {error}"),
    "argument": lambda error: ValueError(error, [str(error)], {"why": str(error)}),
    "group": lambda error: ExceptionGroup("several", [ValueError(str(error.orig)), error]),
    "own message": lambda error: Verbose(str(error.orig)),
}


class Verbose(Exception):
    """Builds its message of something that nobody else reads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._read = lambda: text

    def __str__(self) -> str:
        return f"payment failed: {self._read()}"


def failed(message: str, params: Any, statement: str | None = INSERT) -> DBAPIError:
    return IntegrityError(statement, params, sqlite3.IntegrityError(message))


@given(VALUES, *(st.sampled_from(sorted(each)) for each in (SHOWN, BOUND, WRAPPED)))
@example(CARD, "plain", "names", "text")
@example('it\'s \\ a "card"', "quoted by SQL", "positions", "own message")
@example("İstanbul", "plain", "names", "itself")
def test_a_bound_value_is_in_no_text_of_an_error(value: Any, shown: str, bound: str, wrapped: str) -> None:
    quoted = SHOWN[shown](value) if not isinstance(value, bytes) else f"\\x{value.hex()}"
    error = failed(f"owner 7: {quoted} declined", BOUND[bound](value))
    error.add_note(f"it was {quoted}")
    outer = WRAPPED[wrapped](error)
    if outer is not error:
        outer.__context__ = error
    for text in (text_of(outer), format_error(outer), text_of(error), repr(error.orig)):
        assert quoted not in text
    assert "owner 7: " in str(error)
    assert "declined" in str(error)


@pytest.mark.parametrize("value", [1, 12345, True, None, "EUR", 2.5, b"12345", [], {"a": 1}])
def test_short_values_stay(value: Any) -> None:
    error = failed(f"item {value} of EUR 1 is gone", (value,))
    before = str(error.orig)
    scrub(error)
    assert str(error.orig) == before


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ("custom", "no customer in customs_duties"),
        ("owner_", "owner_id is missing"),
        ("values", "VALUES of cards.owner are refused"),  # the statement has this word
    ],
)
def test_words_around_a_value_stay(bound: str, message: str) -> None:
    error = failed(message.replace("owner_id", "id"), (bound,))
    scrub(error)
    assert str(error.orig) == message.replace("owner_id", "id")


@pytest.mark.parametrize(
    "bound",
    [
        json.dumps({"payment": {"card": CARD}}),
        {"payment": [{"card": CARD}]},
        f"card:{CARD}, Ann",
        "4111 1111 1111 1111",
        "4111-1111-1111-1111",
        float(CARD),
        int(CARD),
        Decimal(CARD),
    ],
    ids=str,
)
def test_a_value_inside_of_a_value_is_hidden(bound: Any) -> None:
    error = failed(f"card {CARD} declined", {"document": bound})
    scrub(error)
    assert CARD not in str(error)


@pytest.mark.parametrize("value", [date(1984, 2, 29), uuid.UUID(int=7**40)], ids=str)
def test_dates_and_uuids_are_values(value: Any) -> None:
    error = failed(f"born {value}", (value,))
    scrub(error)
    assert str(value) not in str(error)


def test_a_literal_of_the_statement_is_a_value() -> None:
    error = failed(f"card {CARD} declined", (), f"INSERT INTO cards VALUES ('{CARD}')")
    scrub(error)
    assert CARD not in str(error)


def test_a_literal_that_names_a_thing_stays() -> None:
    error = failed("table orders_archive is there", (), "SELECT make_table('orders_archive')")
    scrub(error)
    assert str(error.orig) == "table orders_archive is there"


def test_what_a_commit_says_has_no_numbers_and_no_quotes() -> None:
    error = failed(f"card {CARD} of 'Ann Smith' declined in 3 s", None, None)
    scrub(error)
    assert str(error.orig) == "card '…' of '…' declined in 3 s"


def test_what_a_connection_of_sqlite3_says_has_no_numbers_and_no_quotes() -> None:
    def pay(connection: sqlite3.Connection) -> None:
        try:
            connection.execute("SELECT json_extract('{}', ?)", [f"card-{CARD}"])
        except sqlite3.OperationalError as error:
            raise ValueError(f"payment of order 17: {error}")  # noqa: B904

    with closing(sqlite3.connect(":memory:")) as own, pytest.raises(ValueError, match="payment") as caught:
        pay(own)
    assert text_of(caught.value).startswith("ValueError: payment of order 17: ")
    assert CARD not in format_error(caught.value)
    assert "json_extract('{}', ?)" in format_error(caught.value), "lines of code stay"


def test_lines_of_code_in_a_traceback_stay() -> None:
    def declined_with_test_bound_values() -> None:
        raise failed("test_bound_values declined", ("test_bound_values",))

    with pytest.raises(IntegrityError) as caught:
        declined_with_test_bound_values()
    shown = format_error(caught.value)
    assert "test_bound_values.py" in shown
    assert "raise failed(" in shown
    assert "IntegrityError) … declined" in shown


def test_a_line_of_user_code_names_what_it_wants_and_quotes_no_error() -> None:
    try:
        raise failed(f"card {CARD} declined", (CARD, "order-77"))
    except IntegrityError as error:
        record = logging.LogRecord("shop", 40, "", 1, f"order-77: {error.orig}", None, None)
        shown = json.loads(JsonLines().format(record))["message"]
    assert shown == "order-77: card … declined"


def test_without_a_statement_nothing_is_hidden() -> None:
    assert not BoundValues([ValueError(CARD)])
    assert text_of(ValueError(f"card {CARD}")) == f"ValueError: card {CARD}"


def test_a_long_value_takes_no_longer_than_reading() -> None:
    """It took minutes with a pattern that tries every start."""
    long = "x" * 100_000
    values = BoundValues([DBAPIError(INSERT, {"card": long}, sqlite3.Error("refused"))])
    assert long not in values.hide(f"{long} is refused")
