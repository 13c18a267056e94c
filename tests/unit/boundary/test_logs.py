"""A boundary's log lines: one JSON object each, whatever they contain."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from onceward.boundary.server.process import fields, start_logging
from onceward.telemetry.logs import ConsoleLines, JsonLines

log = logging.getLogger("onceward.boundary")


@pytest.fixture
def logging_restored() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("onceward")]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    yield
    logging.captureWarnings(False)
    for each, level, handlers in before:
        each.setLevel(level)
        each.handlers[:] = handlers


def record(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("onceward.boundary", logging.WARNING, "", 0, message, arguments, None)
    vars(made).update(more)
    return made


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonLines(fields).format(made)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.req("BC-25")
def test_a_line_has_time_level_message_and_the_fields_that_apply() -> None:
    line = as_json(record("gap of %d", 3, consumer="hq", offset=7, outcome="gap", created=1.5))
    assert line == {
        "time": "1970-01-01T00:00:01.500+00:00",
        "level": "warning",
        "logger": "onceward.boundary",
        "message": "gap of 3",
        "offset": 7,
        "consumer": "hq",
        "outcome": "gap",
    }
    assert datetime.fromisoformat(line["time"]).tzinfo == UTC


def test_an_offset_of_0_applies_and_a_field_without_a_value_does_not() -> None:
    line = as_json(record("x", offset=0, zone=None))
    assert line["offset"] == 0
    assert "zone" not in line


@pytest.mark.parametrize("odd", ['two\nlines "quoted"', "Zürich \u2028 \x85", "half \ud800", "\x00\x1b[31m"])
def test_no_text_breaks_a_line(odd: str) -> None:
    line = as_json(record("refused: %s", odd, message_id=odd))
    assert line["message_id"] == odd
    assert line["message"] == f"refused: {odd}"


def test_a_value_that_json_does_not_know_is_reported_as_text() -> None:
    assert as_json(record("x", zone=ValueError("odd")))["zone"] == "odd"


def test_an_exception_is_in_the_line_with_its_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        made = record("failed", exc_info=(type(error), error, error.__traceback__))
    assert as_json(made)["traceback"].endswith("ValueError: broken")
    assert ConsoleLines(fields).format(made).endswith("ValueError: broken")


def test_a_line_for_people_has_the_same() -> None:
    line = ConsoleLines(fields).format(record("appended", message_id="m1", offset=7, created=0))
    assert line == "1970-01-01T00:00:00.000+00:00 WARNING appended  message_id=m1  offset=7"


@pytest.mark.usefixtures("logging_restored")
def test_ours_is_heard_at_the_level_and_others_from_warnings_on() -> None:
    stream = io.StringIO()
    start_logging("json", "debug", stream)
    log.debug("ours")
    logging.getLogger("hpack").debug("every byte")
    logging.getLogger("somebody.else").warning("theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("odd", stacklevel=1)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["logger"] for line in lines] == ["onceward.boundary", "somebody.else", "py.warnings"]


@pytest.mark.usefixtures("logging_restored")
def test_a_higher_level_is_for_all() -> None:
    stream = io.StringIO()
    start_logging("console", "error", stream)
    log.warning("ours")
    logging.getLogger("somebody.else").warning("theirs")
    log.error("worse")
    assert stream.getvalue().endswith(" ERROR   worse\n")
    assert len(stream.getvalue().splitlines()) == 1
