"""Text from outside controls no terminal and forges no line."""

from __future__ import annotations

import io
import json
import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward._text import printable, printable_lines
from onceward.cli.output import echo, print_json, print_lines, print_table, write_json
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.logs import ConsoleLines, JsonLines, extras

FORGED = "2026-01-01T00:00:00.000+00:00 INFO    all is well"
ATTACKS = (
    "\x1b[2J\x1b[31m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\",
    "\x9b31m\x9d0;t\x9c",
    "\x1bP$q\x1b\\",
    "\u202egpj.exe",
    "\u2066\u2069\u200f\u061c",
    "\r\x08\x7f\0",
    f"\n{FORGED}",
    f"\r\n{FORGED}",
    f"\u2028{FORGED}",
    f"\x85{FORGED}",
    f"\x0b{FORGED}\x0c{FORGED}",
    "\ud800 \udcff",
)
HARMLESS = (
    "naïve café",
    "漢字かな",
    "עברית",
    "العربية",
    "👩‍👩‍👧 🏳️‍🌈",
    "می‌خواهم",
    "क्‍ष",
    "a\\nb",
    "50 % → ≠ …",
)

attacks = st.lists(
    st.one_of(st.sampled_from(ATTACKS), st.text("a\n\t\x1b\x7f é", max_size=3), st.sampled_from(HARMLESS)),
    max_size=4,
)
texts = attacks.map("".join)


def has_controls(text: str) -> bool:
    """By the categories of Unicode, not by our own list."""
    return any(
        unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(each) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        for each in text
    )


@pytest.mark.req("ST-06")
@given(texts)
def test_a_printable_text_is_one_line_without_controls(text: str) -> None:
    assert not has_controls(printable(text))
    assert len(printable(text).splitlines()) <= 1
    assert not has_controls(printable_lines(text).replace("\n", "").replace("\t", ""))


@pytest.mark.req("ST-06")
@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_in_any_language_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.req("ST-06")
def test_what_is_escaped_can_be_read() -> None:
    assert printable("a\nb\x1b[0m\u202e\ud800") == r"a\nb\x1b[0m\u202e\ud800"


# ── the console log ─────────────────────────────────────────────────────────────────────────────────────


def logged(
    formatter: logging.Formatter, message: str, *args: object, error: BaseException | None = None
) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("shop", logging.WARNING, __file__, 1, message, args, info)
    record.transaction_id = args[0] if args else ""
    return formatter.format(record)


@pytest.mark.req("ST-06")
@given(texts)
def test_a_record_is_one_line_of_the_console_log(text: str) -> None:
    line = logged(ConsoleLines(extras), "order %s failed", text)
    assert not has_controls(line)
    assert len(line.splitlines()) == 1


@pytest.mark.req("ST-06")
@given(texts)
def test_the_message_of_an_error_forges_no_line(text: str) -> None:
    first, *below = logged(ConsoleLines(extras), "it failed", error=ValueError(text)).split("\n")
    assert "it failed" in first
    assert below
    assert all(each.startswith("  | ") and not has_controls(each.replace("\t", "")) for each in below)


@pytest.mark.req("ST-06")
@given(texts)
def test_a_line_of_json_stays_json(text: str) -> None:
    line = logged(JsonLines(), "order %s failed", text, error=ValueError(text))
    assert len(line.splitlines()) == 1
    assert json.loads(line)["transaction_id"] == text


@pytest.mark.req("ST-06")
@pytest.mark.parametrize("attack", ATTACKS)
def test_our_own_lines_are_safe_in_the_logging_of_others(
    attack: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        OwnLogger(logging.getLogger("onceward.test")).warning("order %s: %s", attack, ValueError(attack))
    assert not has_controls(caplog.messages[0])


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("ST-06")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_command_prints_nothing_that_a_terminal_obeys(
    attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = f"order {attack} end"
    echo(value)
    print_lines(value)
    print_table(
        [{"id": value, "lines": (value, value), "list": [value]}],
        {"id": "id", "lines": "lines", "list": "list"},
        "",
    )
    shown = capsys.readouterr().out
    assert not has_controls(shown.replace("\n", ""))
    assert not any(line.strip().startswith(FORGED[:10]) for line in shown.splitlines())


@pytest.mark.req("ST-06")
@given(texts)
def test_printed_json_has_the_text_itself_and_no_controls(text: str) -> None:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", printed)
        print_json({text: [text]})
        whole = printed.getvalue()
        write_json(json.dumps(text, ensure_ascii=False))
    assert json.loads(whole) == {text: [text]}
    assert json.loads(printed.getvalue().removeprefix(whole)) == text
    assert not has_controls(printed.getvalue().replace("\n", ""))
