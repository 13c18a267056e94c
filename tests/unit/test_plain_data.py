"""Payloads as plain data: what a process sends again is equal to what another one sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pydantic
import pytest

from onceward.models import as_plain_data

TAGS = frozenset(f"tag-{number}" for number in range(40))


@dataclass
class Order:
    number: int = 1
    tags: frozenset[str] = TAGS
    more: dict[str, Any] = field(default_factory=lambda: {"tags": TAGS})


class Struct(msgspec.Struct):
    tags: frozenset[str] = TAGS


class Inner(pydantic.BaseModel):
    tags: frozenset[str] = TAGS


class Model(pydantic.BaseModel):
    number: int = 1
    tags: set[str] = set(TAGS)
    inner: list[Inner] = [Inner()]
    by_name: dict[str, frozenset[int]] = {"one": frozenset({3, 1, 2})}


@pytest.mark.req("CC-120")
@pytest.mark.parametrize(
    "payload",
    [{"tags": TAGS}, {"in": [{"tags": set(TAGS)}]}, Order(), Struct(), Inner(), {"model": Inner()}, [TAGS]],
    ids=lambda payload: type(payload).__name__,
)
def test_a_set_is_sent_in_one_order(payload: Any) -> None:
    """Text hashes differently in each process, so a set has another order there, and a copy had another digest."""
    found: list[list[str]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for each in value.values():
                look(each)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            found.append(value)
        elif isinstance(value, list):
            for each in value:
                look(each)

    look(as_plain_data(payload))
    assert found
    assert all(each == sorted(TAGS) for each in found)


@pytest.mark.req("CC-120")
def test_models_of_pydantic_keep_the_order_of_everything_else() -> None:
    plain = as_plain_data(Model())
    assert plain == {
        "number": 1,
        "tags": sorted(TAGS),
        "inner": [{"tags": sorted(TAGS)}],
        "by_name": {"one": [1, 2, 3]},
    }
    assert as_plain_data([3, 1, 2]) == [3, 1, 2]


@pytest.mark.parametrize("payload", [{1: {"b", "a"}}, {"mixed": {1, "a", None}}])
def test_what_cannot_be_sorted_is_sent_all_the_same(payload: dict[Any, Any]) -> None:
    (plain,) = as_plain_data(payload).values()
    (given,) = payload.values()
    assert set(plain) == given


def test_a_dict_is_sent_as_it_is() -> None:
    payload = {"b": 1, "a": {"d": [1, None], "c": "x"}, 3: 1.5}
    plain = as_plain_data(payload)
    assert plain == payload
    assert plain is not payload
    assert [*plain] == ["b", "a", 3]
    with pytest.raises(TypeError, match="object cannot be sent; a payload must be plain data"):
        as_plain_data({"a": object()})
