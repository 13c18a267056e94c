"""What operators write: a reason, or the cause of a failure."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward.console.forms import LONGEST_TEXT
from tests.integration.console.test_access import Shop

pytestmark = pytest.mark.req("UI-08")

LONG = f"{'the provider changed its format, and ' * 60}here is the end"
"""Longer than a line."""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    made.bury("a", "b")
    yield made
    made.engine.dispose()


FORMS = {
    "/letters/hold": {"consumer": "billing", "ids": "1", "reason": LONG},
    "/letters/redrive": {"consumer": "billing", "ids": "1", "root_cause": LONG, "fix_ref": "v2"},
    "/letters/1/edit": {"payload": '{"id": "a", "n": 1}', "cause": LONG, "do": "save"},
    "/consumers/charge/pause": {"reason": LONG},
}


@pytest.mark.parametrize("path", FORMS)
def test_a_long_reason_is_kept_whole(shop: Shop, path: str) -> None:
    answer = shop.client().post(path, **FORMS[path])
    assert answer.status_code == 303, answer.text
    kept = json.dumps([dict(each) for each in (*shop.letters.audit(), *shop.letters.rcas())], default=str)
    assert LONG in kept


@pytest.mark.parametrize("path", FORMS)
def test_one_that_is_too_long_is_refused_and_nothing_is_changed(shop: Shop, path: str) -> None:
    fields = {name: "x" * (LONGEST_TEXT + 1) if text == LONG else text for name, text in FORMS[path].items()}
    answer = shop.client().post(path, **fields)
    assert answer.status_code == 400
    page = html.unescape(answer.text)
    assert "has 5,001 characters, and may have 5,000; nothing was changed" in page
    assert "Back button leads to the form, with what you typed" in page
    assert shop.letters.audit() == []


def test_no_field_cuts_off_what_is_pasted(shop: Shop) -> None:
    for path in ("/letters/1", "/letters/1/edit", "/consumers/charge"):
        assert "maxlength" not in shop.client().get(path).text, path
