"""Rows of a run, and what of them is compared."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from onceward.verify.plan import UNKNOWN
from onceward.verify.tables import without_unknown

PAYLOAD = {"b": 1, "a": {"c": [1, "two"]}}
NEWER = {**PAYLOAD, UNKNOWN: {"anything": [1, None]}}


@pytest.mark.req("CC-030")
def test_a_column_that_keeps_the_payload_as_json_may_keep_a_field_that_is_not_known() -> None:
    for before, after in (
        (json.dumps(PAYLOAD), json.dumps(NEWER)),
        (json.dumps(PAYLOAD).encode(), json.dumps(NEWER).encode()),
        (json.dumps({"event": PAYLOAD}), json.dumps({"event": NEWER}, indent=2)),
        (json.dumps([PAYLOAD]), json.dumps([NEWER])),
    ):
        assert without_unknown({"kept": Counter([("o1", before)])}) == without_unknown(
            {"kept": Counter([("o1", after)])}
        )


def test_other_values_stay_as_they_are() -> None:
    rows = {
        "kept": Counter([("{half", 1, None, b"\xff"), ("{half", 1, None, b"\xff"), (UNKNOWN, 2, "[", b"")])
    }
    assert without_unknown(rows) == rows
    assert without_unknown({"kept": Counter([("[1, 2]",)])}) != without_unknown(
        {"kept": Counter([("[2, 1]",)])}
    )
