"""Which letters a filter selects, and which filters are refused."""

from __future__ import annotations

from typing import Any

import pytest

from onceward.deadletters import Category, Filter, Rca, Status
from onceward.errors import ConfigurationError


@pytest.mark.parametrize(
    ("values", "narrow"),
    [
        ({}, False),
        ({"consumer": "billing"}, False),
        ({"consumer": "billing", "status": "open"}, False),
        ({"older_than": 0}, False),
        ({"older_than": 60}, True),
        ({"younger_than": 60}, True),
        ({"event_type": ""}, True),
        ({"category": "business"}, True),
        ({"text": "x"}, True),
        ({"ids": [1]}, True),
        ({"ids": []}, False),
        ({"aggregate_id": "a"}, True),
        ({"message_id": "m"}, True),
    ],
)
def test_a_filter_is_narrow_when_it_names_more_than_whose(values: dict[str, Any], narrow: bool) -> None:
    assert Filter(**values).is_narrow is narrow


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"category": "magic"}, "category must be one of"),
        ({"status": "gone"}, "status must be one of"),
        ({"older_than": -1}, "must be 0 or more seconds"),
        ({"younger_than": float("nan")}, "must be 0 or more seconds"),
        ({"text": " "}, "every error"),
    ],
)
def test_filters_that_mean_nothing_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Filter(**values)


def test_words_become_what_they_name() -> None:
    wanted: Any = Filter(category="poison", status="open", ids=[3, 1])  # type: ignore[arg-type]
    assert (wanted.category, wanted.status, wanted.ids) == (Category.POISON, Status.OPEN, (3, 1))
    assert wanted.as_dict() == {"category": "poison", "status": "open", "ids": (3, 1)}


def test_a_text_is_taken_as_it_is() -> None:
    condition, values = Filter(text="100%_!'; DROP TABLE x").as_sql()
    assert "DROP" not in condition
    assert values["f_text"] == "%100!%!_!!'; DROP TABLE x%"


def test_ids_are_numbers() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        Filter(ids=("1); DROP TABLE x --",)).as_sql()  # type: ignore[arg-type]


def test_an_rca_has_a_category_that_exists() -> None:
    with pytest.raises(ConfigurationError, match="one of infrastructure"):
        Rca(category="weather", root_cause="rain", fix_ref="roof")  # type: ignore[arg-type]
