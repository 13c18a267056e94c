"""The cases of a slow test that `make test` has: those that it names, and a name that is wrong is found."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import TESTS, pytest_collection_modifyitems

CASES = ("plain-True", "plain-False", "plain twice-True", "plain twice-False", "slow-True")


class Case:
    """What pytest collects."""

    def __init__(self, name: str, *usual: str) -> None:
        self.name = self.nodeid = f"tests/unit/test_file.py::test_it[{name}]"
        self.path = TESTS / "unit" / "test_file.py"
        self.callspec = SimpleNamespace(id=name)
        self.marks = [pytest.mark.usual(*usual).mark]
        if name.startswith("slow"):
            self.marks.append(pytest.mark.long.mark)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)

    def add_marker(self, name: str) -> None:
        self.marks.append(getattr(pytest.mark, name).mark)


def collect(*usual: str, cases: tuple[str, ...] = CASES, asked: str = "tests") -> list[str]:
    """The names of those that are not long."""
    items: list[Any] = [Case(name, *usual) for name in cases]
    config: Any = SimpleNamespace(args=[asked])
    pytest_collection_modifyitems(config, items)
    return [item.callspec.id for item in items if not item.get_closest_marker("long")]


@pytest.mark.parametrize(
    ("usual", "expected"),
    [
        (["plain"], ["plain-True", "plain-False"]),
        (["plain-True", "plain twice-False"], ["plain-True", "plain twice-False"]),
        (["plain", "slow"], ["plain-True", "plain-False"]),
        (["True"], ["plain-True", "plain twice-True"]),
    ],
)
def test_the_cases_that_a_test_names_are_usual(usual: list[str], expected: list[str]) -> None:
    assert collect(*usual) == expected


def test_a_name_of_no_case_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match=r"::test_it has no case 'plane', which `usual` names"):
        collect("plain", "plane")


def test_a_test_with_no_usual_case_is_refused() -> None:
    with pytest.raises(
        pytest.UsageError, match="::test_it has no case left: all that `usual` names are long"
    ):
        collect("slow")


def test_a_single_case_can_be_run() -> None:
    assert collect("plain", cases=("plain twice-True",), asked="tests/unit/test_file.py::test_it") == []
