"""Errors: one tree, and nothing is lost when they cross a process boundary."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import pickle
import threading
from typing import Any

import pytest

from onceward import Transaction
from onceward.errors import ConfigurationError, OncewardError
from onceward.task import exceptions
from onceward.task.exceptions import (
    AttemptInterrupted,
    ConsumerLoopTimeoutException,
    ExceptionCategory,
    FetchException,
    FetchTimeoutException,
    InputException,
    IOGuardError,
    LoopError,
    NotSentException,
    Postponed,
    ProducerLoopTimeoutException,
    SettlementException,
    TransactionException,
    UnawaitedError,
    UnrecordedError,
)
from onceward.task.report import Report, StopReason

BUSINESS, SYSTEM, TIMEOUT = ExceptionCategory

TREE: list[tuple[type[BaseException], tuple[type[BaseException], ...]]] = [
    (OncewardError, (Exception,)),
    (ConfigurationError, (OncewardError, ValueError)),
    (TransactionException, (OncewardError,)),
    (Postponed, (OncewardError,)),
    (IOGuardError, (OncewardError,)),
    (UnawaitedError, (OncewardError,)),
    (UnrecordedError, (OncewardError,)),
    (LoopError, (OncewardError,)),
    (FetchException, (LoopError,)),
    (FetchTimeoutException, (FetchException, TimeoutError)),
    (SettlementException, (LoopError,)),
    (InputException, (LoopError,)),
    (NotSentException, (LoopError,)),
    (ConsumerLoopTimeoutException, (LoopError, TimeoutError)),
    (ProducerLoopTimeoutException, (LoopError, TimeoutError)),
    (AttemptInterrupted, (BaseException,)),
]
ERRORS: list[Any] = [cls for cls, _ in TREE if issubclass(cls, OncewardError)]
every_error = pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
LOOP_ERRORS: list[Any] = [cls for cls in ERRORS if issubclass(cls, LoopError)]


# ── the tree ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("cls", "bases"), TREE, ids=lambda value: getattr(value, "__name__", ""))
def test_each_error_has_the_bases_the_tree_shows(cls: type, bases: tuple[type, ...]) -> None:
    assert cls.__bases__ == bases


def test_the_tree_is_complete() -> None:
    defined = {
        value
        for value in vars(exceptions).values()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert defined == {cls for cls, _ in TREE}


def test_every_error_is_in_the_drawing() -> None:
    assert exceptions.__doc__ is not None
    assert all(cls.__name__ in exceptions.__doc__ for cls, _ in TREE)


def test_an_interrupt_is_not_caught_by_except_exception() -> None:
    assert not issubclass(AttemptInterrupted, Exception)


@pytest.mark.parametrize(
    "cls", [FetchTimeoutException, ConsumerLoopTimeoutException, ProducerLoopTimeoutException]
)
def test_a_loop_that_ran_out_of_time_is_every_kind_of_timeout_error(cls: type) -> None:
    assert issubclass(cls, TimeoutError)
    assert issubclass(cls, asyncio.TimeoutError)
    assert issubclass(cls, concurrent.futures.TimeoutError)


@pytest.mark.parametrize("cls", [FetchException, SettlementException, InputException, LoopError])
def test_other_loop_errors_are_no_timeout_errors(cls: type) -> None:
    assert not issubclass(cls, TimeoutError)


# ── categories ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CE-26")
def test_there_are_three_categories_and_no_other() -> None:
    assert [str(category) for category in ExceptionCategory] == ["BUSINESS", "SYSTEM", "TIMEOUT"]


@pytest.mark.req("CE-26")
@pytest.mark.parametrize("cls", LOOP_ERRORS)
def test_a_loop_error_is_timeout_if_it_is_a_timeout_error_and_else_system(cls: Any) -> None:
    assert cls("x").category is (TIMEOUT if issubclass(cls, TimeoutError) else SYSTEM)


def test_a_transaction_exception_is_system_unless_it_says_otherwise() -> None:
    assert TransactionException("x").category is SYSTEM


@pytest.mark.parametrize("given", [BUSINESS, "BUSINESS"])
def test_a_category_may_be_given_by_name(given: Any) -> None:
    assert TransactionException("x", category=given).category is BUSINESS


@pytest.mark.parametrize("bad", ["FATAL", "", None, "business "])
def test_another_category_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="ExceptionCategory"):
        TransactionException("x", category=bad)


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_transaction_exception_says_category_transaction_and_message() -> None:
    assert str(TransactionException("card expired", BUSINESS, "t7")) == "BUSINESS [t7]: card expired"


def test_a_transaction_exception_of_nobody_says_category_and_message() -> None:
    assert str(TransactionException("card expired", BUSINESS)) == "BUSINESS: card expired"


def test_a_transaction_exception_shows_its_parts_in_its_repr() -> None:
    text = repr(TransactionException("card expired", BUSINESS, "t7"))
    assert text == "TransactionException('card expired', category=BUSINESS, transaction_id='t7')"


def test_a_subclass_shows_its_own_name() -> None:
    class CardExpired(TransactionException):
        pass

    assert repr(CardExpired("x")).startswith("CardExpired('x'")


@every_error
def test_every_error_has_its_message_in_its_text(cls: Any) -> None:
    assert "what happened" in str(cls("what happened"))


def test_the_cause_may_be_given_or_raised_from() -> None:
    original = ValueError("x")
    assert TransactionException("y", cause=original).cause is original
    with pytest.raises(TransactionException) as raised:
        raise TransactionException("y") from original
    assert raised.value.cause is original
    assert TransactionException("y").cause is None


@pytest.mark.parametrize("cls", LOOP_ERRORS)
def test_a_loop_error_has_no_report_until_it_is_given_one(cls: Any) -> None:
    assert cls("x").report is None


# ── pickling ────────────────────────────────────────────────────────────────────────────────────────────


def pickled(error: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> Any:
    return pickle.loads(pickle.dumps(error, protocol))


@every_error
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_keeps_type_text_and_arguments(cls: Any, protocol: int) -> None:
    error = cls("what happened")
    again = pickled(error, protocol)
    assert type(again) is cls
    assert (str(again), repr(again), again.args) == (str(error), repr(error), error.args)


@every_error
def test_every_error_keeps_its_cause(cls: Any) -> None:
    error = cls("outer")
    error.__cause__ = ValueError("inner")
    again = pickled(error)
    assert type(again.__cause__) is ValueError
    assert again.__cause__.args == ("inner",)


def test_a_transaction_exception_keeps_category_transaction_id_and_message() -> None:
    again = pickled(TransactionException("card expired", BUSINESS, "t7", KeyError("card")))
    assert (again.category, again.transaction_id, again.message) == (BUSINESS, "t7", "card expired")
    assert isinstance(again.cause, KeyError)


@pytest.mark.parametrize("cls", LOOP_ERRORS)
def test_a_loop_error_keeps_its_report(cls: Any) -> None:
    error = cls("x")
    error.report = Report(succeeded=3, failed=1, retries=2, stop_reason=StopReason.TIMEOUT)
    error.report.failed_by_category[BUSINESS] = 1
    again = pickled(error)
    assert again.report == error.report
    assert again.report.stop_reason is StopReason.TIMEOUT
    assert again.category is error.category


def test_causes_of_causes_are_kept_to_the_last() -> None:
    innermost = TransactionException("3", BUSINESS, "t", cause=ValueError("4"))
    chain = FetchException("1")
    chain.__cause__ = TransactionException("2", cause=innermost)
    again = pickled(chain)
    assert again.cause.cause.category is BUSINESS
    assert [again.cause.message, again.cause.cause.message] == ["2", "3"]
    assert again.cause.cause.cause.args == ("4",)


def test_causes_behind_an_error_of_somebody_else_are_kept() -> None:
    theirs = ValueError("2")
    theirs.__cause__ = KeyError("3")
    again = pickled(TransactionException("1", cause=theirs))
    assert isinstance(again.cause.__cause__, KeyError)


class Connected(Exception):
    """An error as drivers raise them: it holds something that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Picky(Exception):
    """An error that pickles but does not unpickle: its arguments are not those of its constructor."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"{host}:{port}")


@pytest.mark.parametrize(
    "cause", [Connected("connection lost"), Picky("db", 5432)], ids=["pickle", "unpickle"]
)
def test_a_cause_that_does_not_pickle_does_not_keep_its_error_from_pickling(cause: Exception) -> None:
    again = pickled(TransactionException("card expired", BUSINESS, "t7", cause))
    assert (again.category, again.transaction_id) == (BUSINESS, "t7")
    assert str(cause) in str(again.cause)


class CardExpired(TransactionException):
    """As users write them: with their own constructor."""

    def __init__(self, card: str) -> None:
        super().__init__(f"card {card} expired", category=BUSINESS)
        self.card = card


def test_an_error_class_of_a_user_with_its_own_constructor_keeps_everything() -> None:
    again = pickled(CardExpired("4111"))
    assert type(again) is CardExpired
    assert (again.card, again.category, again.message) == ("4111", BUSINESS, "card 4111 expired")


def test_notes_are_kept() -> None:
    error = TransactionException("x")
    error.add_note("seen in Vienna")
    assert pickled(error).__notes__ == ["seen in Vienna"]


@every_error
def test_every_error_can_be_copied(cls: Any) -> None:
    error = cls("what happened")
    assert str(copy.copy(error)) == str(copy.deepcopy(error)) == str(error)


def test_an_error_does_not_carry_the_transaction_itself() -> None:
    transaction = Transaction(id="t7", payload="4111")
    assert "4111" not in repr(vars(TransactionException("x", BUSINESS, transaction.id)))
