"""Contracts: one that cannot be kept is refused when it is created, with a helpful message."""

from __future__ import annotations

import copy
import functools
import json
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NotRequired, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.errors import ConfigurationError
from onceward.inbox.contract import Contract
from tests.support.inbox.contracts import contract, refusal


def up(payload: Any) -> Any:
    return payload


async def up_later(payload: Any) -> Any:
    return payload


def up_in_parts(payload: Any) -> Iterator[Any]:
    yield payload


class Upcaster:
    def __call__(self, payload: Any) -> Any:
        return payload


class PydanticModel(pydantic.BaseModel):
    amount: int = 0


class StructModel(msgspec.Struct):
    amount: int = 0


@dataclass
class DataclassModel:
    amount: int = 0


@pydantic.dataclasses.dataclass
class PydanticDataclassModel:
    amount: int = 0


class TypedDictModel(TypedDict):
    amount: NotRequired[int]


class StrictPydantic(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class StrictHeir(StrictPydantic):
    pass


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True):
    pass


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(extra="forbid"))
class StrictDataclass:
    pass


class HidesStrictPydantic(pydantic.BaseModel):
    lines: dict[str, list[StrictPydantic | None]] = {}


class HidesStrictStruct(msgspec.Struct):
    lines: list[StrictStruct] | None = None


@dataclass
class HidesTwoDeep:
    hides: tuple[HidesStrictStruct, ...] = ()


class Tree(msgspec.Struct):
    children: list[Tree] = []


class Unresolved(msgspec.Struct):
    later: NotThere | None = None  # type: ignore[name-defined]  # noqa: F821


class TestDefaults:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("retention", "standard"),
            ("dedup_days", None),
            ("source_days", 7),
            ("dead_letter_days", 90),
            ("replay_days", 0),
            ("mode", "transactional"),
            ("schema_version", 1),
            ("upcasters", {}),
            ("model", None),
            ("sequencing", "none"),
            ("gap_timeout", 300),
            ("poison_after", 3),
            ("lease", 60),
        ],
    )
    def test_what_is_not_said(self, field: str, value: Any) -> None:
        assert getattr(contract(), field) == value

    @pytest.mark.parametrize("field", ["consumer_id", "event_types", "owner_team", "idempotency_mechanism"])
    def test_what_must_be_said(self, field: str) -> None:
        fields = {"consumer_id": "c", "event_types": ["t"], "owner_team": "o", "idempotency_mechanism": "m"}
        del fields[field]
        with pytest.raises(ConfigurationError, match=f"needs {field}; write Contract"):
            Contract(**fields)  # type: ignore[arg-type]


class TestRefusals:
    WRONG: ClassVar[list[tuple[str, Any, str]]] = [
        ("consumer_id", "", "is empty"),
        ("consumer_id", "  ", "is empty"),
        ("consumer_id", None, "must be a string, not NoneType"),
        ("consumer_id", "x" * 201, "has 201 characters; shorten it to at most 200"),
        ("consumer_id", "a\x00b", "control characters"),
        ("consumer_id", "a\x7fb", "control characters"),
        ("consumer_id", "a\ud800b", "control characters"),
        ("consumer_id", " billing", "spaces around it"),
        ("owner_team", "", "is empty"),
        ("owner_team", 7, "must be a string, not int"),
        ("idempotency_mechanism", "", "must say in words"),
        ("idempotency_mechanism", " \n", "must say in words"),
        ("idempotency_mechanism", True, "must say in words"),
        ("idempotency_mechanism", "a\x00b", "a database cannot store"),
        ("event_types", [], "is empty"),
        ("event_types", "paid", "write event_types=['paid']"),
        ("event_types", 7, "must be a list of types, not int"),
        ("event_types", {"paid": 1}, "must be a list of types, not dict"),
        ("event_types", [""], "an event type is empty"),
        ("event_types", [7], "an event type must be a string, not int"),
        ("event_types", ["x" * 201], "has 201 characters"),
        ("event_types", ["a\nb"], "control characters"),
        ("event_types", ["paid", "sent", "paid"], "lists 'paid' more than once"),
        ("event_types", ["*", "paid"], "together with others"),
        ("event_types", ["order.*"], "the only pattern is '*' alone"),
        ("retention", "forever", "must be one of standard, financial, legal-hold, not 'forever'"),
        ("mode", "both", "must be one of transactional, effectful, not 'both'"),
        ("sequencing", None, "must be one of none, latest-wins, strict, not None"),
        ("sequencing", ["strict"], "must be one of none, latest-wins, strict"),
        ("dedup_days", 0, "must be a positive number of days, not 0"),
        ("dedup_days", math.nan, "not nan"),
        ("dedup_days", math.inf, "not inf"),
        ("source_days", -1, "must be a number of days, 0 or more, not -1"),
        ("source_days", math.inf, "not inf"),
        ("source_days", "7", "not '7'"),
        ("source_days", True, "not True"),
        ("dead_letter_days", 89, "kept for at least 90 days"),
        ("dead_letter_days", math.nan, "not nan"),
        ("replay_days", None, "not None"),
        ("schema_version", 0, "must be an integer, 1 or more, not 0"),
        ("schema_version", True, "not True"),
        ("schema_version", 1.0, "not 1.0"),
        ("poison_after", 0, "must be an integer, 1 or more, not 0"),
        ("poison_after", "3", "not '3'"),
        ("lease", 0, "must be a positive number of seconds, not 0"),
        ("lease", math.inf, "not inf"),
        ("gap_timeout", -1, "not -1"),
        ("gap_timeout", math.nan, "not nan"),
        ("model", dict, "must be a pydantic model, a msgspec Struct, a dataclass or a TypedDict"),
        ("model", PydanticModel(), "must be a pydantic model"),
        ("upcasters", [up], "must map each version to a function, not be a list"),
    ]

    @pytest.mark.parametrize(("field", "value", "problem"), WRONG)
    def test_a_wrong_value_is_refused_with_the_problem(self, field: str, value: Any, problem: str) -> None:
        assert problem in refusal(**{field: value})

    @pytest.mark.parametrize(("field", "value", "problem"), [row for row in WRONG if row[0] != "consumer_id"])
    def test_a_refusal_names_consumer_and_field(self, field: str, value: Any, problem: str) -> None:
        text = refusal(**{field: value})
        assert text.startswith("consumer 'billing': ")
        assert field.removesuffix("s").replace("_", " ") in text.replace("_", " ")

    def test_a_very_long_value_is_not_shown_in_full(self) -> None:
        assert len(refusal(consumer_id="x" * 100_000)) < 300

    @pytest.mark.parametrize("sequencing", ["latest-wins", "strict"])
    def test_sequencing_needs_an_end_to_waiting(self, sequencing: str) -> None:
        assert "gap_timeout must be a positive" in refusal(sequencing=sequencing, gap_timeout=0)

    def test_without_sequencing_nothing_waits(self) -> None:
        assert contract(gap_timeout=0).gap_timeout == 0


class TestEventTypes:
    @pytest.mark.parametrize("given_", [["a", "b"], ("a", "b"), {"b", "a"}])
    def test_they_are_kept_as_a_tuple(self, given_: Any) -> None:
        assert contract(event_types=given_).event_types == ("a", "b")

    @pytest.mark.parametrize(
        ("types", "event_type", "taken"),
        [
            (["paid", "sent"], "sent", True),
            (["paid"], "PAID", False),
            (["paid"], "paid.late", False),
            (["paid"], "", False),
            (["*"], "paid", True),
            (["*"], "", True),
            (["paid"], "*", False),
        ],
    )
    def test_it_accepts_what_it_names(self, types: list[str], event_type: str, taken: bool) -> None:
        assert contract(event_types=types).accepts(event_type) is taken


class TestUpcasters:
    @pytest.mark.req("CC-021")
    @pytest.mark.parametrize(
        ("versions", "current", "gaps"),
        [
            ([1, 3], 4, ["from 2 to 3"]),
            ([1], 3, ["from 2 to 3"]),
            ([2, 5], 7, ["from 3 to 4", "from 4 to 5", "from 6 to 7"]),
        ],
    )
    def test_a_gap_in_the_chain_is_refused_with_every_missing_link(
        self, versions: list[int], current: int, gaps: list[str]
    ) -> None:
        text = refusal(schema_version=current, upcasters=dict.fromkeys(versions, up))
        assert all(f"no upcaster {gap}" in text for gap in gaps)

    def test_a_huge_gap_is_refused_in_few_words(self) -> None:
        assert len(refusal(schema_version=20_260_301, upcasters={1: up})) < 500

    @pytest.mark.parametrize(
        ("upcasters", "problem"),
        [
            ({1: "up"}, "the upcaster from 1 to 2 must be a function of the payload, not str"),
            ({1: up_later}, "the upcaster from 1 to 2 is a coroutine function"),
            ({1: functools.partial(up_later)}, "the upcaster from 1 to 2 is a coroutine function"),
            ({1: up_in_parts}, "the upcaster from 1 to 2 has a `yield`"),
            ({2: up}, "the upcaster from 2 to 3 leads beyond schema_version=2"),
            ({0: up, 1: up}, "1 or more, not 0"),
            ({True: up}, "1 or more, not True"),
            ({"1": up}, "1 or more, not '1'"),
        ],
    )
    def test_a_link_that_cannot_work_is_refused(self, upcasters: dict[Any, Any], problem: str) -> None:
        assert problem in refusal(schema_version=2, upcasters=upcasters)

    @given(oldest=st.integers(1, 30), length=st.integers(0, 30))
    def test_a_whole_chain_goes_back_to_its_oldest_version(self, oldest: int, length: int) -> None:
        chain = dict.fromkeys(range(oldest, oldest + length), up)
        assert contract(schema_version=oldest + length, upcasters=chain).oldest_version == oldest

    @given(length=st.integers(2, 20), data=st.data())
    def test_a_chain_with_any_link_but_the_oldest_taken_out_is_refused(
        self, length: int, data: st.DataObject
    ) -> None:
        chain = dict.fromkeys(range(1, length + 1), up)
        lost = data.draw(st.integers(2, length))
        del chain[lost]
        assert f"no upcaster from {lost} to {lost + 1}" in refusal(schema_version=length + 1, upcasters=chain)

    def test_without_any_only_the_current_version_is_understood(self) -> None:
        assert contract(schema_version=3).oldest_version == 3

    def test_the_chain_that_was_checked_cannot_be_changed(self) -> None:
        made = contract(schema_version=2, upcasters={1: up})
        with pytest.raises(TypeError, match="read-only"):
            made.upcasters[1] = len  # type: ignore[index]

    def test_the_callers_dict_stays_the_callers(self) -> None:
        chain = {1: up}
        made = contract(schema_version=2, upcasters=chain)
        chain.clear()
        assert made.upcasters == {1: up}


class TestModels:
    @pytest.mark.parametrize(
        "model",
        [
            PydanticModel,
            StructModel,
            DataclassModel,
            PydanticDataclassModel,
            TypedDictModel,
            Tree,
            Unresolved,
        ],
    )
    def test_models_of_every_make_are_taken(self, model: type) -> None:
        assert contract(model=model).model is model

    @pytest.mark.req("CC-021")
    @pytest.mark.parametrize("model", [StrictPydantic, StrictHeir, StrictStruct, StrictDataclass])
    def test_one_that_forbids_unknown_fields_is_refused(self, model: type) -> None:
        assert f"{model.__name__} forbids unknown fields" in refusal(model=model)

    @pytest.mark.parametrize(
        ("model", "named"),
        [
            (HidesStrictPydantic, "StrictPydantic"),
            (HidesStrictStruct, "StrictStruct"),
            (HidesTwoDeep, "StrictStruct"),
        ],
    )
    def test_one_that_is_made_of_such_is_refused_too(self, model: type, named: str) -> None:
        assert f":{named} forbids unknown fields" in refusal(model=model)


class TestDescription:
    def test_it_has_every_field(self) -> None:
        assert set(contract().as_row()) == set(Contract.__struct_fields__)

    def test_it_is_plain_data(self) -> None:
        row = contract(schema_version=2, upcasters={1: up}, model=PydanticModel).as_row()
        assert json.loads(json.dumps(row)) == row

    @pytest.mark.parametrize(
        ("upcaster", "name"),
        [
            (up, f"{__name__}:up"),
            (Upcaster(), f"{__name__}:Upcaster"),
            (functools.partial(up), "functools:partial"),
            (len, "builtins:len"),
        ],
    )
    def test_an_upcaster_is_reported_by_its_name(self, upcaster: Any, name: str) -> None:
        assert contract(schema_version=2, upcasters={1: upcaster}).as_row()["upcasters"] == {"1": name}

    def test_a_model_is_reported_by_its_name(self) -> None:
        assert contract(model=StructModel).as_row()["model"] == f"{__name__}:StructModel"

    def test_upcasters_are_reported_in_the_order_of_their_versions(self) -> None:
        chain = dict.fromkeys(range(11, 0, -1), up)
        row = contract(schema_version=12, upcasters=chain).as_row()
        assert list(row["upcasters"]) == [str(version) for version in range(1, 12)]


class TestFrozen:
    def test_it_cannot_be_changed(self) -> None:
        with pytest.raises(AttributeError):
            contract().lease = 1  # type: ignore[misc]

    @pytest.mark.parametrize("journey", [lambda made: pickle.loads(pickle.dumps(made)), copy.deepcopy])
    def test_it_can_be_sent_to_another_process(self, journey: Any) -> None:
        made = contract(schema_version=2, upcasters={1: up}, model=StructModel)
        assert journey(made) == made


@pytest.mark.req("CC-061")
def test_no_effects_names_types_of_the_contract() -> None:
    promised = contract(event_types=["paid", "ping"], no_effects=["ping"])
    assert promised.no_effects == ("ping",)
    assert promised.as_row()["no_effects"] == ["ping"]
    assert (promised.has_effects("paid"), promised.has_effects("ping")) == (True, False)
    assert not contract(event_types=["*"], no_effects=["*"]).has_effects("anything")
    assert "no_effects names 'pong', which is not among its event_types" in refusal(no_effects=["pong"])
    assert "no_effects must be a list of types, not a string" in refusal(no_effects="paid")
