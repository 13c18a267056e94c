"""Plain English: words that this project does not use, in code, messages, documentation and tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import ROOT

RETIRED = {
    r"mend(s|ed|ing)?": "fix",
    r"told": "reported, asked, notified",
    r"anew": "again",
    r"whoever": "name the actor",
    r"(somebody|everybody|anybody) (who|has|is|else|may|can)": "name the actor",
    r"so that (it|the|a|an|they|each|nothing|no|all)": "so",
    r"not to be had": "unavailable",
    r"in hand": "in flight",
    r"put off": "delayed",
    r"mishaps?": "failure",
    r"besides": "also",
    r"for good": "permanently",
    r"handed out": "delivered",
    r"has the say": "owns, decides",
    r"shall": "must, should",
    r"now and then": "from time to time, occasionally",
    r"(whose turn|stands? in line)": "waits, is next",
    r"comes? due": "is due",
    r"those who": "name the actor",
    r"of yours": "your",
    r"lets? (it|them|one) go": "release",
    r"in good order": "cleanly",
}
"""Patterns, and what to write instead."""
NAMES = re.compile(r"def (_told|_shown|_made|_named|_checked|_explained|_connected|_refused)\(")
"""A participle does not say whether the function returns a value, raises or sends."""
KEPT = ("ack still works for what is in hand",)
"""Quotations of the specification."""
FILES = [
    path
    for folder in ("src", "docs", "tests", "tools", "bench")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".in", ".sql") and path != Path(__file__)
] + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if not any(quotation in line for quotation in KEPT)
    ]


def test_retired_words_stay_retired(lines: list[tuple[str, str]]) -> None:
    words = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
    found = [
        f"{place}: {match[0]!r}; write {next(RETIRED[each] for each in RETIRED if re.fullmatch(each, match[0], re.I))}"
        for place, line in lines
        if (match := words.search(line))
    ]
    assert found == []


def test_functions_say_what_they_do(lines: list[tuple[str, str]]) -> None:
    assert [f"{place}: {line.strip()}" for place, line in lines if NAMES.search(line)] == []
