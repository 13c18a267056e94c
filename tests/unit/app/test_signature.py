"""The parameters of a consumer function, and the arguments it gets."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Optional, TypedDict

import msgspec
import pydantic
import pytest

from onceward import Transaction
from onceward.app.signature import Signature
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ExceptionCategory, TransactionException

SECRET = "4111-1111-1111-1111"


class Pydantic(pydantic.BaseModel):
    total: int


class Struct(msgspec.Struct):
    total: int


@dataclasses.dataclass
class Dataclass:
    total: int


class Typed(TypedDict):
    total: int


@dataclasses.dataclass
class Positive:
    total: pydantic.PositiveInt


@dataclasses.dataclass
class Holding:
    """A dataclass with a pydantic model inside."""

    order: Pydantic


class Ignoring(msgspec.Struct):
    total: pydantic.PositiveInt


class Foreign:
    """No payload can be converted into it."""


def taking(hint: Any) -> Callable[..., Any]:
    def charge(order: Any) -> None: ...

    charge.__annotations__ = {"order": hint}
    return charge


def given(hint: Any, payload: Any) -> Any:
    return Signature(taking(hint), session=False).arguments(Transaction(payload=payload))["order"]


PLAIN = {"total": 3}
FITS = [
    (Pydantic, PLAIN, Pydantic(total=3)),
    (Struct, PLAIN, Struct(3)),
    (Dataclass, PLAIN, Dataclass(3)),
    (Typed, PLAIN, PLAIN),
    (dict, PLAIN, PLAIN),
    (dict[str, int], PLAIN, PLAIN),
    (dict | None, None, None),
    (dict | list, [1], [1]),
    (Mapping[str, int], PLAIN, PLAIN),
    (list, [1], [1]),
    (str, "a", "a"),
    (Any, PLAIN, PLAIN),
    (object, PLAIN, PLAIN),
    (int, 3, 3),
    (list[str], ["a"], ["a"]),
    (Optional[Struct], None, None),  # noqa: UP045
    (Struct | None, PLAIN, Struct(3)),
    (Pydantic | None, PLAIN, Pydantic(total=3)),
    (list[Pydantic], [PLAIN], [Pydantic(total=3)]),
    (datetime, "2026-01-02T03:04:05", datetime(2026, 1, 2, 3, 4, 5)),
    (Literal["paid"], "paid", "paid"),
    (pydantic.PositiveInt, 3, 3),
    (Positive, PLAIN, Positive(3)),
    (Holding, {"order": PLAIN}, Holding(Pydantic(total=3))),
    (pydantic.AwareDatetime, "2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
]


@pytest.mark.parametrize(("hint", "payload", "expected"), FITS, ids=str)
def test_the_payload_comes_in_the_type_of_the_annotation(hint: Any, payload: Any, expected: Any) -> None:
    value = given(hint, payload)
    assert (value, type(value)) == (expected, type(expected))


LIKE_DICT = (dict, dict[str, Any], Dataclass, Typed, Struct, Pydantic)
MISFITS = [
    (Pydantic, {"total": SECRET}, "$.total"),
    (Struct, {"total": SECRET}, "$.total"),
    (Dataclass, {"total": SECRET}, "$.total"),
    (Dataclass, {}, "total"),
    (Typed, {"total": SECRET}, "$.total"),
    *((hint, wrong, "$") for hint in LIKE_DICT for wrong in (None, [SECRET], [], SECRET, 3, True)),
    *((list, wrong, "$") for wrong in (None, SECRET, PLAIN, 3)),
    *((str, wrong, "$") for wrong in (None, PLAIN, [SECRET], 3)),
    *((dict | None, wrong, "$") for wrong in ([SECRET], SECRET, 3)),
    *((dict | list, wrong, "$") for wrong in (None, SECRET, 3)),
    (Mapping[str, int], [SECRET], "$"),
    (int, None, "$"),
    (int, "3", "$"),
    (int, SECRET, "$"),
    (int, True, "$"),
    (list[str], ["a", 4111], "$[1]"),
    (Struct | None, {"total": SECRET}, "$.total"),
    (list[Pydantic], [{"total": SECRET}], "$[...].total"),
    (dict[str, Pydantic], {SECRET: {"total": SECRET}}, "$[...].total"),
    (Annotated[int, msgspec.Meta(gt=5)], 3, "$"),
    (Literal["paid"], SECRET, "$"),
    (pydantic.PositiveInt, -3, "$"),
    (list[pydantic.PositiveInt], [3, -3], "$[...]"),
    (pydantic.PositiveInt | None, -3, "$"),
    (Annotated[int, pydantic.Field(gt=5)], 3, "$"),
    (Positive, {"total": -3}, "$.total"),
    (Holding, {"order": {"total": SECRET}}, "$.order.total"),
]


@pytest.mark.parametrize(("hint", "payload", "field"), MISFITS, ids=str)
def test_a_payload_that_does_not_fit_is_a_business_failure_that_names_the_field_and_not_the_value(
    hint: Any, payload: Any, field: str
) -> None:
    with pytest.raises(TransactionException) as refused:
        given(hint, payload)
    assert refused.value.category is ExceptionCategory.BUSINESS
    assert field in str(refused.value)
    assert "charge" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_payload_that_is_one_already_is_not_made_again() -> None:
    made = Struct(3)
    assert given(Struct, made) is made


@pytest.mark.parametrize(
    "hint", [Foreign, list[Foreign], Pydantic | Foreign, complex, Struct | Dataclass, Ignoring]
)
def test_an_annotation_that_no_payload_can_have_is_refused_when_the_function_is_decorated(hint: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"charge takes .* a payload cannot be converted to"):
        Signature(taking(hint), session=False)


def test_an_annotation_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"annotations of charge cannot be read: name 'Missing'"):
        Signature(taking("Missing"), session=False)


# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_parameter_annotated_with_transaction_gets_it_whatever_its_name() -> None:
    def charge(envelope: Transaction, order: Struct) -> None: ...

    transaction = Transaction(payload=PLAIN)
    assert Signature(charge, session=False).arguments(transaction) == {
        "envelope": transaction,
        "order": Struct(3),
    }


def test_a_function_needs_no_payload() -> None:
    def tick() -> None: ...

    assert Signature(tick, session=False).arguments(Transaction(payload=1)) == {}


def test_the_payload_is_the_parameter_without_a_default() -> None:
    def charge(*, dry: bool = False, order: dict[str, int]) -> None: ...

    assert Signature(charge, session=False).arguments(Transaction(payload=PLAIN)) == {"order": PLAIN}


def test_the_session_of_a_contract_goes_by_its_name() -> None:
    def charge(order: Struct, session: object) -> None: ...

    session = object()
    assert (
        Signature(charge, session=True).arguments(Transaction(payload=PLAIN), session)["session"] is session
    )


def test_a_dict_is_passed_on_and_not_copied() -> None:
    assert given(dict, PLAIN) is PLAIN


def decorating(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def charge(order: Struct, transaction: Transaction) -> None: ...

    return functools.wraps(charge)(wrapper)


@pytest.mark.parametrize(
    "wrapper",
    [lambda order: None, lambda order, /, transaction: None, lambda *orders: None, lambda: None],
    ids=["fewer", "by position", "stars", "none"],
)
def test_a_decorator_that_cannot_pass_the_arguments_on_is_refused(wrapper: Callable[..., Any]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"charge cannot be called with order, transaction: .*decorator"
    ):
        Signature(decorating(wrapper), session=False)


def test_a_decorator_that_passes_all_arguments_on_is_accepted() -> None:
    signature = Signature(decorating(lambda *args, **kwargs: None), session=False)
    assert set(signature.arguments(Transaction(payload=PLAIN))) == {"order", "transaction"}


def two(order: Struct, invoice: Struct) -> None: ...
def stars(*orders: Struct) -> None: ...
def more(order: Struct, **others: Any) -> None: ...
def by_position(order: Struct, /) -> None: ...
def with_session(order: Struct, session: object) -> None: ...
def without_session(order: Struct) -> None: ...
def twice(one: Transaction, other: Transaction) -> None: ...


WRONG = [
    (twice, False, "takes the transaction twice: one, other"),
    (two, False, "2 parameters for a payload: order, invoice"),
    (stars, False, r"takes \*orders"),
    (more, False, r"takes \*\*others"),
    (by_position, False, "by position only"),
    (with_session, False, "no contract"),
    (without_session, True, "needs a parameter `session`"),
]


@pytest.mark.parametrize(("function", "session", "problem"), WRONG)
def test_parameters_that_cannot_be_filled_are_refused(function: Any, session: bool, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refused:
        Signature(function, session=session)
    assert function.__name__ in str(refused.value)
    assert inspect.isfunction(function)
