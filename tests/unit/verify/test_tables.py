"""Rows of a run, and what of them is compared."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from onceward.verify.plan import UNKNOWN
from onceward.verify.rows.tables import differ_in_digits, without_unknown

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


def test_sums_of_floats_differ_in_their_last_digits() -> None:
    one, other = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1
    assert one != other
    assert differ_in_digits({"sums": Counter([("a", one)])}, {"sums": Counter([("a", other)])})
    assert not differ_in_digits({"sums": Counter([("a", one)])}, {"sums": Counter([("a", one)])})
    assert not differ_in_digits({"sums": Counter([("a", one)])}, {"sums": Counter([("a", 0.7)])})
    assert not differ_in_digits({"sums": Counter([("a", one)])}, {"sums": Counter([("b", other)])})


def test_other_values_stay_as_they_are() -> None:
    rows = {
        "kept": Counter([("{half", 1, None, b"\xff"), ("{half", 1, None, b"\xff"), (UNKNOWN, 2, "[", b"")])
    }
    assert without_unknown(rows) == rows
    assert without_unknown({"kept": Counter([("[1, 2]",)])}) != without_unknown(
        {"kept": Counter([("[2, 1]",)])}
    )
