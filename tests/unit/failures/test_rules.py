"""Rules: which one applies, and what is refused when they are written down."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from onceward import Onceward, Refuse, RetryLater, business, outage, retry
from onceward.failures.rules import BusinessRule, OutageRule, RetryRule, RuleBook, check_rules
from onceward.inbox import Contract
from onceward.task.exceptions import ExceptionCategory, Postponed, TransactionException


class Declined(Exception):
    pass


def book(**rules: Any) -> RuleBook:
    return RuleBook(
        own=check_rules(rules.get("own", {}), "charge"), of_app=check_rules(rules.get("of_app", {}), "shop")
    )


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.req("OU-01")
def test_the_first_rule_that_fits_wins_those_of_the_consumer_first() -> None:
    rules = book(
        own={Declined: business, lambda error: "slow" in str(error): retry("1s")},
        of_app={Exception: outage(after=7), Declined: retry("1s")},
    )
    assert isinstance(rules.rule_for(Declined()), BusinessRule)
    assert isinstance(rules.rule_for(ValueError("slow")), RetryRule)
    assert rules.rule_for(ValueError("other")) == outage(after=7)
    assert isinstance(rules.rule_for(caused(KeyError("x"), Declined())), BusinessRule)


@pytest.mark.req("OU-01")
def test_by_default_signs_of_an_outage_are_found_along_the_causes() -> None:
    rules = RuleBook()
    assert rules.rule_for(ConnectionError()) == OutageRule()
    assert rules.rule_for(caused(TransactionException("payment failed"), TimeoutError())) == OutageRule()
    hidden = KeyError("while handling it")
    hidden.__context__ = ConnectionError()
    assert rules.rule_for(hidden) == OutageRule()
    hidden.__suppress_context__ = True  # `raise … from None`
    assert rules.rule_for(hidden) is None
    assert rules.rule_for(ValueError()) is None
    # What the handler itself calls a refusal is one, whatever it came from.
    assert rules.rule_for(caused(Refuse("declined"), ConnectionError())) is None


def test_a_chain_of_causes_that_is_a_circle_ends() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert RuleBook().rule_for(one) is None


@pytest.mark.req("OU-02")
def test_the_two_errors_that_a_handler_raises_itself() -> None:
    refused = pickle.loads(pickle.dumps(Refuse("card declined")))
    assert (refused.category, refused.message) == (ExceptionCategory.BUSINESS, "card declined")
    later = pickle.loads(pickle.dumps(RetryLater(after="2m")))
    assert isinstance(later, Postponed)
    assert later.delay == 120.0
    assert RetryLater("quota", after=timedelta(seconds=3)).delay == 3.0
    for wrong in (0, -1, "soon", "2 weeks", float("nan"), True, None, "2d"):
        with pytest.raises(ValueError, match="after"):
            RetryLater(after=wrong)


@pytest.mark.req("OU-09")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (retry, "retry needs a delay"),
        (lambda: retry("5s", times=0), "times must be 1 or more, not 0"),
        (lambda: retry("5s", "1m", times=1), "times must be 2 or more, not 1"),
        (lambda: retry(-5), "a delay of retry must be a positive duration"),
        (lambda: outage(probe_every="-1s"), "probe_every must be a positive duration such as '30s'"),
        (lambda: outage(probe_every=0), "probe_every must be a positive duration"),
        (
            lambda: outage(after=0),
            r"after must be 1 or more different messages, not 0; write outage\(after=3\)",
        ),
        (lambda: outage(of=""), "of must be the name of a dependency"),
        (lambda: Onceward(failures=[ValueError]), "the failures of app must be a dict of rules, not list"),
        (
            lambda: Onceward(failures={ValueError: retry}),
            r"must be business, retry\(…\) or outage\(…\).*write retry",
        ),
        (lambda: Onceward(failures={ValueError: "business"}), r"rule of app for ValueError must be business"),
        (
            lambda: Onceward(failures={int: business}),
            "neither an exception type nor a function of an exception",
        ),
        (lambda: Onceward(failures={"ValueError": business}), "neither an exception type nor a function"),
        (
            lambda: Onceward(dependencies="payments"),
            r"must be a list of names, not 'payments'; write dependencies=\[",
        ),
        (lambda: Onceward(dependencies={"payments": business}), r"must have a rule outage\(…\)"),
        (lambda: Onceward(dependencies=[" "]), "must be names such as 'payments'"),
        (
            lambda: Onceward(failures={KeyError: outage(of="mail")}),
            "outage of 'mail', which the app does not declare",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def contract(**more: Any) -> Contract:
    return Contract(
        consumer_id="billing",
        event_types=["*"],
        owner_team="tests",
        idempotency_mechanism="dedup record",
        **more,
    )


@pytest.mark.req("OU-10")
def test_a_dependency_that_is_named_twice_is_one() -> None:
    """Otherwise a consumer would wait for its own probe."""
    app = Onceward("shop", dependencies=["payments", "mail"])

    @app.consumer("memory://a", depends_on=["payments", "mail", "payments"])
    def charge(order: dict[str, Any]) -> None: ...

    assert app.consumers["charge"].failures.depends_on == ("payments", "mail")


@pytest.mark.req("OU-09", "OU-06")
@pytest.mark.parametrize(
    ("source", "more", "says"),
    [
        (
            "memory://a",
            {"depends_on": ["mail"]},
            r"charge depends on 'mail', .* it declares 'payments': write Onceward",
        ),
        ("memory://a", {"depends_on": "payments"}, r"write depends_on=\['payments'\]"),
        ("memory://a", {"failures": {(): business}}, "for no exception type at all"),
        (
            "memory://a",
            {"failures": {KeyboardInterrupt: business}},
            "KeyboardInterrupt, which ends a process",
        ),
        (
            "memory://a",
            {"contract": contract(), "failures": {OSError: retry("1s", times=20)}},
            "at most 17 times; add max_deliveries=21 to",
        ),
        (
            "memory://a?max_deliveries=5",
            {"contract": contract(tolerates="10m")},
            r"tolerates failures for 10m, but its source memory://a\?max_deliveries=5 buries a failing message after "
            r"0\.8 \+ 1\.6 \+ 3\.2 \+ 6\.4 s = 12s, in 5 deliveries",
        ),
        (
            "memory://a?on_failure=dead_letter",
            {"contract": contract(tolerates=1)},
            "buries a failing message after 0s, at its first failure",
        ),
        (
            "memory://a",
            {"contract": contract(tolerates="10m"), "failures": {OSError: retry("1s", "2m")}},
            r"its rule for OSError buries a failing message after 1 \+ 120 s = 2m 1s, in 3 deliveries; give that more",
        ),
    ],
)
def test_a_consumer_that_cannot_keep_its_word_is_refused(
    source: str, more: dict[str, Any], says: str
) -> None:
    app = Onceward("shop", dependencies=["payments"], database="sqlite:///x.db")

    def charge(order: dict[str, Any], session: Any = None) -> None: ...

    with pytest.raises(ValueError, match=says):
        app.consumer(source, **more)(charge)
    assert "charge" not in app.consumers


@pytest.mark.req("OU-06")
def test_the_defaults_tolerate_an_hour_and_a_wrong_tolerance_is_refused() -> None:
    app = Onceward("shop", database="sqlite:///x.db")

    @app.consumer("memory://a", contract=contract(tolerates="1h"))
    def charge(order: dict[str, Any], session: Any) -> None: ...

    assert app.consumers.charge.contract.tolerates == 3600.0
    for wrong in ("soon", 0, -1, True):
        with pytest.raises(ValueError, match="consumer 'billing': tolerates must be a positive duration"):
            contract(tolerates=wrong)
