"""Texts and errors without the values they quote."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pydantic
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from onceward.app import Onceward
from onceward.db import OptimisticConflict
from onceward.db.engines import hide_values
from onceward.telemetry.logs import start_logging
from onceward.telemetry.redaction import redact, scrub

pytestmark = pytest.mark.req("CC-078")

CARD = "4111111111111111"
BACKGROUND = "(Background on this error at: https://sqlalche.me/e/21/gkpj)"
HIDDEN = "[SQL parameters hidden due to hide_parameters=True]"

REDACTED = {
    f"duplicate key\nDETAIL:  Key (card)=({CARD}) already exists.": "duplicate key",
    f"null value\nDETAIL:  Failing row contains (1, a\nb, {CARD}).\nHINT:  Look.": "null value\nHINT:  Look.",
    f"bad\nCONTEXT:  unnamed portal parameter $1 = '{CARD}'\n[SQL: x]": "bad\n[SQL: x]",
    f"on one line DETAIL: Key (card)=({CARD}) already exists. [SQL: x]": "on one line [SQL: x]",
    repr(f"x\nDETAIL:  Key (a)=({CARD}) is not present."): "'x",
    f"[SQL: x]\n[parameters: ('4]1', '{CARD}')]\n{BACKGROUND}": f"[SQL: x]\n{HIDDEN}\n{BACKGROUND}",
    f"[parameters: ('{CARD}', cut of": HIDDEN,
    f"[SQL: SELECT '{CARD}', 'it''s', {CARD}, 7 FROM t]": "[SQL: SELECT '…', '…', '…', 7 FROM t]",
    f"syntax error\nLINE 1: SELECT \"a\" = '{CARD}'\n   ^": "syntax error\nLINE 1: SELECT \"a\" = '…'\n   ^",
    f'invalid input syntax for type integer: "{CARD}"': 'invalid input syntax for type integer: "…"',
    f'value "{CARD}" is out of range for type integer': 'value "…" is out of range for type integer',
    f"it said: Failing row contains (1, {CARD}).": "it said: Failing row contains (…).",
    f"it said: Key (card)=({CARD}) already exists.": "it said: Key (card)=(…) already exists.",
}
KEPT = (
    'duplicate key value violates unique constraint "cards_pkey"',
    'relation "cards" does not exist',
    "UNIQUE constraint failed: cards.card",
    "card 4111 expired; ask the customer",
    "the key (a) is out of range, and the value too",
    "see the DETAILS: they are in the manual",
)


@pytest.mark.parametrize("given", REDACTED, ids=range(len(REDACTED)))
def test_what_is_quoted_goes_and_names_stay(given: str) -> None:
    assert redact(given) == REDACTED[given]


@pytest.mark.parametrize("given", KEPT)
def test_other_texts_stay_as_they_are(given: str) -> None:
    assert redact(given) is given


@pytest.mark.parametrize("blank", [" ", "\n", "\\n"])
def test_a_long_text_takes_no_longer_than_reading(blank: str) -> None:
    """These took minutes with patterns that try every start."""
    redact(f"bad{blank * 60_000}\nDETAIL:  Key{blank * 60_000}")
    redact(f"bad [SQL: SELECT{blank * 60_000}1]")


def test_validators_do_not_quote_their_input() -> None:
    class Card(pydantic.BaseModel):
        number: int
        expires: int

    for bad in ({"number": f"x{CARD}", "expires": [CARD]}, {"expires": CARD + "]"}):
        with pytest.raises(pydantic.ValidationError) as caught:
            Card.model_validate(bad)
        assert CARD not in redact(str(caught.value))
        assert "number" in redact(str(caught.value))


def test_msgspec_does_not_quote_its_input() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"kind": CARD}, dict[str, Literal["visa"]])
    assert CARD in str(caught.value)
    assert redact(str(caught.value)) == "Invalid enum value - at `$[...]`"


def test_a_tree_of_errors_may_be_circular_and_broken() -> None:
    class Broken(Exception):
        __slots__ = ()

        def __str__(self) -> str:
            raise RuntimeError

    first, second = ValueError(f"[parameters: {CARD}]"), Broken(f"[parameters: {CARD}]")
    first.__cause__, second.__context__ = second, first
    group = ExceptionGroup("two", [first, second])
    scrub(group)
    scrub(None)
    assert first.args == second.args == (HIDDEN,)


@pytest.mark.parametrize("sets", [1, 2, 50])
def test_parameters_that_a_message_quotes_without_their_label_go(sets: int) -> None:
    given = [{"card": CARD, "name": f"O'Hara {number}"} for number in range(sets)]
    engine = create_engine("sqlite://")
    with pytest.raises(OperationalError) as caught, engine.connect() as connection:
        connection.execute(text("INSERT INTO nowhere VALUES (:card, :name)"), given)
    engine.dispose()
    params = caught.value.params
    one = params[0] if isinstance(params, list) else params
    error = ValueError(f"order 7 with {one}", repr(f"{one}"), {"given": f"{params}" if sets < 50 else ""})
    error.__cause__ = caught.value
    scrub(error)
    assert CARD not in repr(error)
    assert "order 7 with …" in repr(error)


def test_engines_of_an_app_hide_values_from_the_start(tmp_path: Path) -> None:
    engine = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db").create_engine()
    statement = text("SELECT missing FROM nowhere WHERE card = :card")
    with pytest.raises(OperationalError) as caught, engine.begin() as connection:
        connection.execute(statement, {"card": CARD})
    assert CARD not in str(caught.value)
    assert HIDDEN in str(caught.value)
    engine.dispose()


def test_an_error_of_a_driver_is_scrubbed_when_the_engine_raises_it() -> None:
    engine = hide_values(create_engine("sqlite://"))
    with pytest.raises(Exception, match="syntax error") as caught, engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT '{CARD}' FROM FROM x")
    engine.dispose()
    assert CARD not in str(caught.value)


def test_a_conflict_names_the_columns_of_its_key_not_their_values() -> None:
    conflict = OptimisticConflict("cards", {"card": CARD}, 3)
    assert CARD not in str(conflict)
    assert conflict.key == {"card": CARD}


@pytest.fixture
def _own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, hooks = root.handlers[:], root.level, (sys.excepthook, threading.excepthook)
    yield
    root.handlers[:], (sys.excepthook, threading.excepthook) = handlers, hooks
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize("form", ["json", "console"])
def test_a_run_hides_values_in_lines_of_user_code(capsys: pytest.CaptureFixture[str], form: str) -> None:
    start_logging(form, "info")
    engine = create_engine("sqlite://", poolclass=NullPool)  # a thread alone can close its connection

    def fail() -> None:
        with engine.connect() as connection:
            connection.execute(text("SELECT :card FROM nowhere"), {"card": CARD})

    log = logging.getLogger("shop")
    try:
        fail()
    except Exception as error:
        log.exception("payment failed: %s", error, extra={"why": str(error)})
        log.error("%(why)s", {"why": error})
        log.error(f"payment failed: {error!s}")
        log.error("payment failed", extra={"error": error, "errors": [error], "by": {"why": str(error)}})
    thread = threading.Thread(target=fail, name="helper")
    thread.start()
    thread.join()
    engine.dispose()
    sys.excepthook(ValueError, ValueError(f"[parameters: ('{CARD}',)]"), None)
    shown = capsys.readouterr().err
    assert CARD not in shown
    assert "thread helper failed" in shown
    assert "the process failed" in shown
    assert shown.count("nowhere") >= 4
    if form == "json":
        assert all(json.loads(line) for line in shown.splitlines())


class UniqueViolation(Exception):
    """As asyncpg has it."""

    sqlstate = "23505"
    detail = f"Key (card)=({CARD}) already exists."


class NotFound(Exception):
    """As web frameworks have it: their detail is the message itself."""

    def __init__(self, status: int, detail: str) -> None:
        self.status, self.detail = status, detail
        super().__init__(status, detail)

    def __str__(self) -> str:
        return f"{self.status}: {self.detail}"


def test_a_detail_is_hidden_if_it_is_of_postgresql_and_not_if_it_is_what_the_error_says() -> None:
    missing = NotFound(404, "no such customer")
    scrub(missing)
    assert str(missing) == "404: no such customer"
    wrapper = RuntimeError(f"cannot save it: {UniqueViolation.detail}")
    wrapper.__cause__ = UniqueViolation("duplicate key value")
    scrub(wrapper)
    assert CARD not in str(wrapper)
