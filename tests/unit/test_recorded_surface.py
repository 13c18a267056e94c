"""Formats, tables, keys, names, commands and variables are as recorded: code that relies on them notices no release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.record_surface import differences, recorded, surface

HOW_TO_CHANGE = """
Others rely on these. If the change is intended, provide for what is stored or configured the old way, then record it
with `python -m tests.unit.record_surface`, and commit the file together with the reason."""


@pytest.fixture(scope="module")
def found(redis_url: str, postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("surface")
    return surface(redis_url, postgres_url, folder)


@pytest.mark.req("ST-01")
@pytest.mark.parametrize("part", sorted(recorded()))
def test_what_others_rely_on_is_as_recorded(found: dict[str, Any], part: str) -> None:
    changes = differences(recorded()[part], found[part], part)
    assert not changes, "\n".join([*changes, HOW_TO_CHANGE])


@pytest.mark.req("ST-01")
def test_every_part_is_recorded(found: dict[str, Any]) -> None:
    assert sorted(found) == sorted(recorded())


def test_a_difference_names_what_changed() -> None:
    before = {"tables": {"a": ["id TEXT", "at REAL"], "b": []}, "version": 1}
    after = {"tables": {"a": ["id TEXT", "at TEXT"], "c": []}, "version": 2}
    assert differences(before, before) == []
    assert differences(before, after) == [
        "gone: tables › a › at REAL",
        "new: tables › a › at TEXT",
        "gone: tables › b",
        "new: tables › c",
        "changed: version: 1 is now 2",
    ]
    assert differences(["a", "b"], ["b", "a"], "order") == ["changed: order: ['a', 'b'] is now ['b', 'a']"]
