"""Middleware that looks on: what it sees of attempts, alone, in company, and around others that wrap."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from onceward import Middleware, Transaction
from onceward.middleware import StepCall, StepInfo
from onceward.run import tally
from onceward.run.tally import SharedTally
from onceward.task.attempts.observers import ObservingMiddleware, StepObserver
from tests.support.world import ListSource, World, business, consuming, retry, system, transactions

pytestmark = pytest.mark.req("MW-01")


class Witness(ObservingMiddleware, StepObserver):
    """Records what it sees of the main step."""

    def __init__(self, label: str, log: list[str]) -> None:
        self.label = label
        self.log = log

    def observer(self, step: StepInfo) -> StepObserver | None:
        return self if step.name == "process" else None

    def begins(self, transaction: Transaction) -> str:
        self.log.append(f"{self.label} begins")
        return f"note of {self.label}"

    def returned(self, transaction: Transaction, note: Any, result: Any) -> None:
        assert note == f"note of {self.label}"
        self.log.append(f"{self.label} returned {result}")

    def raised(self, transaction: Transaction, note: Any, error: Exception) -> Exception:
        assert note == f"note of {self.label}"
        self.log.append(f"{self.label} raised {type(error).__name__}")
        return error


class Judge(Witness):
    """Makes a business error of any other."""

    def raised(self, transaction: Transaction, note: Any, error: Exception) -> Exception:
        super().raised(transaction, note, error)
        return business("judged")


class Bouncer(Witness):
    """Lets no attempt begin."""

    def begins(self, transaction: Transaction) -> str:
        raise business("not today")


class Wrapper(Middleware):
    """Wraps, as the middleware of a user does."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        async def around(transaction: Transaction, *rest: Any) -> Any:
            self.log.append(f"wrapper {step.name}")
            return await call(transaction, *rest)

        return around if step.name == "process" else call


def run(world: World, process: Any, *middleware: Middleware, attempts: int = 1) -> Any:
    task = world.consumer(process, source=ListSource(transactions(1)))
    task.middleware = middleware
    return world.consume(task, consuming(process=retry(attempts)))


def test_observers_see_a_success_from_the_outside_in_and_back(world: World) -> None:
    log: list[str] = []
    report = run(world, lambda _: "a result", Witness("outer", log), Witness("inner", log))
    assert report.succeeded == 1
    assert log == ["outer begins", "inner begins", "inner returned a result", "outer returned a result"]


def test_observers_see_each_failed_attempt(world: World) -> None:
    log: list[str] = []

    def fail(_: Transaction) -> None:
        raise system("no")

    report = run(world, fail, Witness("only", log), attempts=2)
    assert (report.failed, report.retries) == (1, 1)
    assert log == ["only begins", "only raised TransactionException"] * 2


def test_what_an_inner_observer_makes_of_an_error_is_what_the_outer_one_sees(world: World) -> None:
    log: list[str] = []

    def fail(_: Transaction) -> None:
        raise KeyError("order")

    report = run(world, fail, Witness("outer", log), Judge("inner", log), attempts=3)
    assert (report.failed, report.retries) == (1, 0)  # a business error is not retried
    assert log[2:] == ["inner raised KeyError", "outer raised TransactionException"]


def test_an_attempt_that_an_observer_refuses_is_not_made(world: World) -> None:
    log: list[str] = []
    report = run(world, lambda _: log.append("handler"), Bouncer("bouncer", log), Witness("inner", log))
    assert report.failed == 1
    assert log == []


@pytest.mark.parametrize("wrapper_first", [True, False])
def test_observers_and_middleware_that_wraps_share_a_chain(world: World, wrapper_first: bool) -> None:
    log: list[str] = []
    chain = (
        (Wrapper(log), Witness("witness", log)) if wrapper_first else (Witness("witness", log), Wrapper(log))
    )
    report = run(world, lambda _: None, *chain)
    assert report.succeeded == 1
    begun = ["wrapper process", "witness begins"]
    assert log == [*(begun if wrapper_first else reversed(begun)), "witness returned None"]


def test_a_handler_whose_code_has_not_run_is_seen_as_a_failure(world: World) -> None:
    log: list[str] = []
    report = run(world, lambda _: (number for number in range(3)), Witness("only", log))
    assert report.failed == 1
    assert log == ["only begins", "only raised TypeError"]


def test_attempts_counted_together_are_what_they_are_one_by_one() -> None:
    seconds = [0.0, 0.0001, 0.00011, 0.004, 0.005, 59.0, 60.0, 300.0, 301.0]
    together, one_by_one = array("q", [0] * tally.SIZE), array("q", [0] * tally.SIZE)
    SharedTally(together).count_done(list(reversed(seconds)))
    for each in seconds:
        SharedTally(one_by_one).count("done", each, 0)
    assert together == one_by_one
    SharedTally(together).count_done([])
    assert together == one_by_one
