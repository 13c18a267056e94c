"""Upcasting: every old version reaches the handler as the current one, and nothing else reaches it."""

from __future__ import annotations

import copy
import enum
import pickle
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NotRequired, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.inbox.contract import Contract
from onceward.inbox.errors import Breach, ContractError
from onceward.inbox.event import Event
from onceward.inbox.upcasting import check_type, upcast
from onceward.task.exceptions import ExceptionCategory
from tests.support.inbox.contracts import contract

SECRET = "4111-1111-1111-1111"


def event(payload: Any = None, version: int = 1, event_type: str = "paid") -> Event:
    return Event(
        tracking_id="e1",
        event_type=event_type,
        created_at=datetime(2026, 3, 1, tzinfo=UTC),
        payload=payload,
        schema_version=version,
        aggregate_id="a1",
        sequence=4,
        lock_token="t1",
        deliveries=2,
    )


def breach(contract_: Contract, event_: Event) -> ContractError:
    with pytest.raises(ContractError) as caught:
        upcast(contract_, event_)
    return caught.value


def log(name: Any) -> Any:
    """An upcaster that records its name, changing its argument in place."""

    def upcaster(payload: Any) -> Any:
        payload.setdefault("log", []).append(name)
        return payload

    return upcaster


async def later() -> None: ...


def chain(oldest: int, current: int) -> Contract:
    return contract(
        schema_version=current, upcasters={version: log(version) for version in range(oldest, current)}
    )


@pytest.mark.req("CC-021")
class TestChain:
    @given(current=st.integers(1, 15), data=st.data())
    def test_an_old_event_goes_through_every_step_in_order(self, current: int, data: st.DataObject) -> None:
        version = data.draw(st.integers(1, current))
        result = upcast(chain(1, current), event({"log": []}, version))
        assert result.payload["log"] == list(range(version, current))
        assert result.schema_version == current

    def test_an_event_of_the_current_version_is_the_same_event(self) -> None:
        current = event({"a": 1}, 3)
        assert upcast(chain(1, 3), current) is current

    def test_a_newer_version_is_a_breach(self) -> None:
        error = breach(chain(1, 3), event({}, 4))
        assert error.kind is Breach.SCHEMA
        assert "has schema version 4, but consumer 'billing' supports at most 3" in error.message

    def test_a_version_before_the_oldest_is_a_breach(self) -> None:
        error = breach(chain(3, 5), event({}, 2))
        assert error.kind is Breach.SCHEMA
        assert "no upcaster from 2 to 3" in error.message

    def test_without_upcasters_an_older_version_is_a_breach(self) -> None:
        assert breach(contract(schema_version=2), event({}, 1)).kind is Breach.SCHEMA

    def test_an_upcaster_that_raises_is_a_breach(self) -> None:
        error = breach(contract(schema_version=2, upcasters={1: lambda payload: payload["gone"]}), event({}))
        assert error.kind is Breach.SCHEMA
        assert "the upcaster from 1 to 2 of consumer 'billing' raised KeyError" in error.message


class TestBreach:
    def failing(self) -> ContractError:
        def upcaster(payload: Any) -> Any:
            raise ValueError(payload["card"])

        return breach(contract(schema_version=2, upcasters={1: upcaster}), event({"card": SECRET}))

    def test_it_keeps_what_the_upcaster_raised_as_its_cause(self) -> None:
        assert isinstance(self.failing().cause, ValueError)

    def test_its_own_words_quote_nothing_of_it(self) -> None:
        assert SECRET not in str(self.failing())

    def test_it_is_never_worth_another_try(self) -> None:
        assert self.failing().category is ExceptionCategory.BUSINESS

    def test_it_names_the_event(self) -> None:
        assert self.failing().tracking_id == "e1"

    def test_it_pickles_with_its_cause(self) -> None:
        arrived = pickle.loads(pickle.dumps(self.failing()))
        assert (arrived.kind, type(arrived.cause)) == (Breach.SCHEMA, ValueError)

    def test_what_is_no_exception_passes_through(self) -> None:
        def upcaster(payload: Any) -> Any:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            upcast(contract(schema_version=2, upcasters={1: upcaster}), event({}))


class TestPayload:
    def test_an_upcaster_that_changes_its_argument_does_not_change_the_event(self) -> None:
        sent = event({"log": [], "deep": {"log": []}})
        before = copy.deepcopy(sent.payload)
        upcast(chain(1, 4), sent)
        assert sent.payload == before

    def test_the_digest_of_what_was_sent_stays(self) -> None:
        sent = event({"log": []})
        before = sent.digest
        upcast(chain(1, 4), sent)
        assert sent.digest == before

    def test_a_failed_chain_leaves_the_event_as_it_was_too(self) -> None:
        sent = event({"log": []})
        broken = contract(schema_version=3, upcasters={1: log(1), 2: lambda payload: payload["gone"]})
        breach(broken, sent)
        assert sent.payload == {"log": []}

    def test_nothing_but_payload_and_version_is_another(self) -> None:
        sent = event({})
        result = upcast(chain(1, 2), sent)
        assert msgspec.structs.replace(result, payload=sent.payload, schema_version=1) == sent

    def test_a_schema_version_in_the_payload_is_raised_at_each_step(self) -> None:
        seen: list[int] = []

        def upcaster(payload: Any) -> Any:
            seen.append(payload["schema_version"])
            return payload

        made = contract(schema_version=4, upcasters={1: upcaster, 2: upcaster, 3: upcaster})
        result = upcast(made, event({"schema_version": 1}))
        assert [*seen, result.payload["schema_version"]] == [1, 2, 3, 4]

    def test_a_payload_without_a_schema_version_gets_none(self) -> None:
        assert "schema_version" not in upcast(chain(1, 3), event({})).payload

    def test_a_constant_that_an_upcaster_returns_is_not_changed(self) -> None:
        constant = MappingProxyType({"schema_version": 0})
        result = upcast(contract(schema_version=2, upcasters={1: lambda _: constant}), event({}))
        assert (result.payload["schema_version"], constant["schema_version"]) == (2, 0)

    def test_a_payload_may_be_anything(self) -> None:
        result = upcast(contract(schema_version=2, upcasters={1: lambda payload: payload + 1}), event(41))
        assert result.payload == 42

    def test_the_version_is_raised_even_if_the_payload_is_the_same(self) -> None:
        assert (
            upcast(
                contract(schema_version=2, upcasters={1: lambda payload: payload}), event(1)
            ).schema_version
            == 2
        )

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    @pytest.mark.parametrize("make", [later, lambda: (each for each in "ab")])
    def test_an_upcaster_that_returns_before_it_has_run_is_refused(self, make: Any) -> None:
        error = breach(contract(schema_version=2, upcasters={1: lambda _: make()}), event({}))
        assert "so its code has not run" in error.message

    def test_an_upcaster_that_forgets_to_return_is_a_breach(self) -> None:
        error = breach(contract(schema_version=2, upcasters={1: lambda payload: None}), event({}))
        assert error.kind is Breach.SCHEMA
        assert "returned None" in error.message

    def test_an_upcaster_may_leave_nothing_as_nothing(self) -> None:
        assert (
            upcast(contract(schema_version=2, upcasters={1: lambda payload: payload}), event()).payload
            is None
        )

    def test_a_payload_that_cannot_be_copied_is_a_breach(self) -> None:
        assert breach(chain(1, 2), event({"lock": threading.Lock()})).kind is Breach.PAYLOAD


class Colour(enum.Enum):
    RED = "red"


class PydanticLine(pydantic.BaseModel):
    sku: int


class PydanticModel(pydantic.BaseModel):
    amount: int
    currency: str = "EUR"
    lines: list[PydanticLine] = []
    by_mail: dict[str, PydanticLine] = {}
    colour: Colour = Colour.RED
    buyer: int = pydantic.Field(default=0, alias="buyerId")

    @pydantic.field_validator("currency")
    @classmethod
    def known(cls, value: str) -> str:
        if value == SECRET:
            raise ValueError(f"what is {value}?")
        if value == "bug":
            raise KeyError(value)
        return value


class StructLine(msgspec.Struct):
    sku: int


class StructModel(msgspec.Struct):
    amount: int
    currency: str = "EUR"
    lines: list[StructLine] = []
    by_mail: dict[str, StructLine] = {}
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.currency == SECRET:
            raise ValueError(f"what is {self.currency}?")
        if self.currency == "bug":
            raise KeyError(self.currency)


@dataclass
class DataclassModel:
    amount: int
    currency: str = "EUR"


@pydantic.dataclasses.dataclass
class PydanticDataclassModel:
    amount: int
    currency: str = "EUR"


class TypedDictModel(TypedDict):
    amount: int
    currency: NotRequired[str]


class Greedy(pydantic.BaseModel):
    amount: int

    @pydantic.model_validator(mode="before")
    @classmethod
    def rename(cls, data: Any) -> Any:
        data["amount"] = data.pop("sum")
        return data


CLASSES: list[Any] = [PydanticModel, StructModel, DataclassModel, PydanticDataclassModel]
every_class = pytest.mark.parametrize("model", CLASSES)
every_model = pytest.mark.parametrize("model", [*CLASSES, TypedDictModel])


class TestModel:
    @every_class
    def test_the_handler_gets_the_model(self, model: type) -> None:
        assert type(upcast(contract(model=model), event({"amount": 3})).payload) is model

    @pytest.mark.req("CC-021")
    @every_class
    def test_an_unknown_field_is_ignored(self, model: type) -> None:
        assert upcast(contract(model=model), event({"amount": 3, "new": 1})).payload == model(amount=3)

    @pytest.mark.req("CC-021")
    def test_an_unknown_field_is_left_out_of_a_typed_dict(self) -> None:
        result = upcast(contract(model=TypedDictModel), event({"amount": 3, "new": 1}))
        assert result.payload == {"amount": 3}

    @pytest.mark.req("CC-021")
    @every_class
    def test_a_missing_optional_field_gets_its_default(self, model: type) -> None:
        assert upcast(contract(model=model), event({"amount": 3})).payload.currency == "EUR"

    @every_class
    def test_an_old_event_is_upcast_first(self, model: type) -> None:
        made = contract(model=model, schema_version=2, upcasters={1: lambda old: {"amount": old["sum"]}})
        assert upcast(made, event({"sum": 5})).payload.amount == 5

    @every_class
    def test_a_payload_that_is_the_model_already_is_taken(self, model: type) -> None:
        assert upcast(contract(model=model), event(model(amount=3))).payload == model(amount=3)

    @every_model
    def test_the_event_that_was_sent_stays_as_it_was(self, model: type) -> None:
        sent = event({"amount": 3})
        upcast(contract(model=model), sent)
        assert sent == event({"amount": 3})

    def test_a_validator_that_changes_its_input_does_not_change_the_event(self) -> None:
        sent = event({"sum": 3})
        assert upcast(contract(model=Greedy), sent).payload.amount == 3
        assert sent.payload == {"sum": 3}

    @every_model
    @pytest.mark.parametrize("payload", [{}, {"amount": "x"}, [], None, "text"])
    def test_what_does_not_fit_is_a_breach(self, model: type, payload: Any) -> None:
        assert breach(contract(model=model), event(payload)).kind is Breach.PAYLOAD

    @pytest.mark.parametrize(
        ("model", "payload", "reported"),
        [
            (PydanticModel, {}, "$.amount: Field required"),
            (PydanticModel, {"amount": SECRET}, "$.amount: Input should be a valid integer"),
            (PydanticModel, SECRET, "$: Input should be a valid dictionary or instance of PydanticModel"),
            (
                PydanticModel,
                {"amount": 1, "lines": [{"sku": SECRET}]},
                "$.lines[...].sku: Input should be a valid integer",
            ),
            (PydanticModel, {"amount": 1, "by_mail": {SECRET: {}}}, "$.by_mail[...].sku: Field required"),
            (PydanticModel, {"amount": 1, "colour": SECRET}, "$.colour: Input should be "),
            (PydanticModel, {"amount": 1, "currency": SECRET}, "$.currency: value_error"),
            (PydanticModel, {"amount": 1, "buyerId": SECRET}, "$.buyerId: Input should be a valid integer"),
            (
                PydanticModel,
                {"currency": 1},
                "$.amount: Field required, $.currency: Input should be a valid string",
            ),
            (PydanticModel, {"amount": 1, "lines": [{}] * 12}, "and 2 more"),
            (PydanticDataclassModel, {"amount": SECRET}, "$.amount: Input should be a valid integer"),
            (StructModel, {}, "$: Object missing required field `amount`"),
            (StructModel, {"amount": SECRET}, "$.amount: Expected `int`, got `str`"),
            (StructModel, {"amount": 1, "lines": [{"sku": SECRET}]}, "$.lines[0].sku: Expected `int`"),
            (StructModel, {"amount": 1, "by_mail": {SECRET: {}}}, "$.by_mail[...]: Object missing"),
            (StructModel, {"amount": 1, "colour": SECRET}, "$.colour: Invalid enum value"),
            (StructModel, {"amount": 1, "currency": SECRET}, "$: its code raised ValueError"),
            (DataclassModel, {"amount": SECRET}, "$.amount: Expected `int`, got `str`"),
            (TypedDictModel, {"amount": SECRET}, "$.amount: Expected `int`, got `str`"),
        ],
    )
    def test_a_breach_names_fields_and_problems_and_never_a_value(
        self, model: type, payload: Any, reported: str
    ) -> None:
        error = breach(contract(model=model), event(payload))
        assert reported in error.message
        assert SECRET not in f"{error}{error!r}{error.__cause__}{error.__context__}"

    @pytest.mark.parametrize("model", [PydanticModel, StructModel])
    def test_a_bug_in_the_model_is_a_breach_with_its_cause(self, model: type) -> None:
        error = breach(contract(model=model), event({"amount": 1, "currency": "bug"}))
        assert error.kind is Breach.PAYLOAD
        assert "its code raised KeyError" in error.message
        assert isinstance(error.cause, KeyError)

    def test_a_breach_names_event_consumer_and_model(self) -> None:
        text = breach(contract(model=StructModel), event({})).message
        assert "event 'e1': its payload does not fit StructModel of consumer 'billing'" in text


class TestType:
    @pytest.mark.parametrize(("types", "event_type"), [(["paid"], "paid"), (["*"], "paid"), (["*"], "")])
    def test_one_that_the_contract_names_passes(self, types: list[str], event_type: str) -> None:
        check_type(contract(event_types=types), event(event_type=event_type))

    @pytest.mark.parametrize(
        ("event_type", "reported"),
        [("sent", "is of type 'sent'"), ("", "has no event_type"), ("PAID", "is of type 'PAID'")],
    )
    def test_another_is_a_breach(self, event_type: str, reported: str) -> None:
        with pytest.raises(ContractError) as caught:
            check_type(contract(), event(event_type=event_type))
        assert caught.value.kind is Breach.EVENT_TYPE
        assert reported in caught.value.message
        assert "consumer 'billing' accepts paid" in caught.value.message
