"""Which category a failure has, however it was given: the same for retries, reports, spans, sources and handlers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from onceward.connectors.lease_rules import describe_failure
from onceward.deadletters import Category
from onceward.deadletters.burial import burial_of
from onceward.task.exceptions import ExceptionCategory, Postponed, TransactionException
from onceward.task.report import Report
from onceward.testing.telemetry import record
from onceward.transaction import Transaction
from tests.support.world import SettlingSource, World, consuming, producing, retry, transactions

pytestmark = pytest.mark.timeout(60)

BUSINESS, SYSTEM, TIMEOUT = ExceptionCategory


class Refused(TransactionException):
    category = BUSINESS


class RefusedInText(TransactionException):
    category = "BUSINESS"  # type: ignore[assignment]


class RefusedLater(TransactionException):
    def __init__(self) -> None:
        super().__init__("no")
        self.category = "BUSINESS"  # type: ignore[assignment]


class RefusedWithoutSuper(TransactionException):
    def __init__(self) -> None:
        self.category = BUSINESS


class RefusedByProperty(TransactionException):
    def __init__(self) -> None: ...

    @property
    def category(self) -> Any:  # type: ignore[override]
        return "BUSINESS"


class Frozen(TransactionException):
    category = BUSINESS

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "__traceback__":
            raise AttributeError("frozen")

    def __init__(self) -> None: ...


class Nothing(TransactionException):
    category = None  # type: ignore[assignment]


class Nonsense(TransactionException):
    category = "URGENT"  # type: ignore[assignment]


class Unhashable(TransactionException):
    category: Any = {"code": 1}  # noqa: RUF012


class Broken(TransactionException):
    def __init__(self) -> None: ...

    @property
    def category(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no category today")


class Unshown(TransactionException):
    category = BUSINESS

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Hidden(TransactionException):
    """Nothing of it can be read but its category."""

    category = BUSINESS

    def __init__(self) -> None: ...

    def __getattribute__(self, name: str) -> Any:
        if name in ("message", "transaction_id", "kind"):
            raise RuntimeError(f"no {name}")
        return super().__getattribute__(name)


class Late(TransactionException):
    category = TIMEOUT


class Foreign(Exception):
    """Not ours: what it calls a category means nothing here."""

    def __init__(self, category: Any) -> None:
        super().__init__("foreign")
        self.category = category


GIVEN: list[tuple[Any, ExceptionCategory]] = [
    (Refused, BUSINESS),
    (lambda: Refused("no", category=TIMEOUT), TIMEOUT),
    (RefusedInText, BUSINESS),
    (RefusedLater, BUSINESS),
    (RefusedWithoutSuper, BUSINESS),
    (RefusedByProperty, BUSINESS),
    (Frozen, BUSINESS),
    (Unshown, BUSINESS),
    (Hidden, BUSINESS),
    (lambda: TransactionException("no", category="BUSINESS"), BUSINESS),
    (Late, TIMEOUT),
    (TransactionException, SYSTEM),
    (Nothing, SYSTEM),
    (Nonsense, SYSTEM),
    (Unhashable, SYSTEM),
    (Broken, SYSTEM),
    (lambda: Foreign("BUSINESS"), SYSTEM),
    (lambda: Foreign(BUSINESS), SYSTEM),
    (lambda: Foreign(None), SYSTEM),
    (lambda: Foreign([]), SYSTEM),
]
given = pytest.mark.parametrize(("make", "category"), GIVEN)


def run(world: World, role: str, watched: bool, **steps: Any) -> tuple[Report, SettlingSource, Any]:
    """Run two transactions, and return the report, the source and what was recorded."""
    source = SettlingSource(transactions(2))
    limits = {step: retry(2) for step in steps}

    def call() -> Report:
        if role == "consumer":
            return world.consume(world.consumer(**steps, source=source), consuming(**limits))
        limits["produce"] = limits.pop("process")
        renamed = {"produce" if name == "process" else name: each for name, each in steps.items()}
        return world.produce(world.producer(**renamed), source.items, producing(**limits))

    if not watched:
        return call(), source, None
    with record() as recording:
        return call(), source, recording


@pytest.mark.req("CE-04", "CE-05")
@given
@pytest.mark.parametrize("role", ["consumer", "producer"])
@pytest.mark.parametrize("watched", [False, True])
def test_a_category_means_the_same_however_it_was_given(
    world: World, make: Any, category: ExceptionCategory, role: str, watched: bool
) -> None:
    def fail(_: Any) -> Any:
        return make()

    report, source, recording = run(world, role, watched, process=fail, exception=lambda *_: None)
    tries = 1 if category is BUSINESS else 2
    main = "process" if role == "consumer" else "produce"
    assert world.steps_of("t1") == [main] * tries + ["exception"]
    assert report.failed_by_category[category] == 2
    assert [error.category for _, error in world.errors] == [category] * 2
    assert all(str(error).startswith(f"{category} [{id_}]") for id_, error in world.errors)
    for settlement in source.reported:
        assert describe_failure(settlement.error, 1, 0.0)[0] is category
    if recording is not None:
        span = recording.spans("process" if role == "consumer" else "produce.attempt")[0]
        assert span.attributes["category"] == category


@given
@pytest.mark.parametrize("role", ["consumer", "producer"])
@pytest.mark.parametrize("step", ["success", "exception"])
def test_a_handler_may_raise_any_of_them(
    world: World, make: Any, category: ExceptionCategory, role: str, step: str
) -> None:
    steps: dict[str, Any] = {
        "process": lambda _: OSError() if step == "exception" else None,
        "success": lambda *_: None,
        "exception": lambda *_: None,
        step: lambda *_: make(),
    }
    report, _, _ = run(world, role, False, **steps)
    wanted = SYSTEM if (role, step) == ("producer", "success") else category
    assert report.failed_by_category[wanted] == 2
    assert world.steps_of("t1").count(step) == (1 if wanted is BUSINESS else 2)


@pytest.mark.parametrize("wrong", [None, "URGENT", 7])
def test_nonsense_that_a_handler_makes_of_the_category_counts_as_system(world: World, wrong: Any) -> None:
    def spoil(_: Any, error: TransactionException) -> None:
        error.category = wrong

    report, source, _ = run(world, "consumer", True, process=lambda _: Refused("no"), exception=spoil)
    assert report.failed_by_category[SYSTEM] == 2
    assert [describe_failure(each.error, 1, 0.0)[0] for each in source.reported] == [SYSTEM] * 2


@pytest.mark.parametrize("step", ["process", "success"])
def test_a_foreign_error_without_a_category_is_not_shown_as_postponed(world: World, step: str) -> None:
    steps: dict[str, Any] = {"process": lambda _: None, step: lambda *_: Foreign(None)}
    _, _, recording = run(world, "consumer", True, **steps)
    name = "process" if step == "process" else "handle_success"
    for span in recording.spans(name):
        assert span.attributes["category"] == SYSTEM
        assert "outcome" not in span.attributes


def test_a_postponement_in_a_handler_is_shown_as_the_failure_it_is(world: World) -> None:
    _, _, recording = run(
        world, "consumer", True, process=lambda _: None, success=lambda *_: Postponed("later")
    )
    assert recording.spans("handle_success")[0].attributes["category"] == SYSTEM


@given
def test_a_burial_goes_by_the_same_category(make: Any, category: ExceptionCategory) -> None:
    burial = burial_of(Transaction(id="t0"), consumer="billing", error=make())
    assert burial.category is (Category.BUSINESS if category is BUSINESS else Category.INFRASTRUCTURE)


class Sorted(TransactionException):
    category = BUSINESS
    kind = "poison"


def test_a_kind_of_the_users_own_is_not_a_breach_of_contract() -> None:
    assert '"kind"' not in describe_failure(Sorted("no"), 1, 0.0)[2]
    assert (
        burial_of(Transaction(id="t0"), consumer="billing", error=Sorted("no")).category is Category.BUSINESS
    )


@pytest.mark.parametrize(
    "again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"]
)
def test_a_category_of_the_class_survives_copies(again: Any) -> None:
    assert again(Refused("no")).category is BUSINESS
    assert repr(again(Refused("no"))) == "Refused('no', category=BUSINESS, transaction_id=None)"
