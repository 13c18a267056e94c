"""Rules: which one applies, and what is refused when they are written down."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from onceward import Onceward, Refuse, RetryLater, business, outage, retry
from onceward.failures.rules import BusinessRule, OutageRule, RetryRule, RuleBook, check_rules, members_of
from onceward.inbox import Contract
from onceward.task.exceptions import ExceptionCategory, Postponed, TransactionException, postponement_of


class Declined(Exception):
    pass


async def later(error: BaseException) -> bool:
    return False


def lazy(error: BaseException) -> Iterator[bool]:
    yield False


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


@pytest.mark.req("OU-01")
def test_a_group_is_what_all_of_its_members_are() -> None:
    """As `asyncio.TaskGroup` raises it, also for a single error."""
    rules = RuleBook(own={Declined: BusinessRule()})
    down = caused(KeyError("x"), ConnectionError())
    assert rules.rule_for(ExceptionGroup("", [TimeoutError()])) == OutageRule()
    assert rules.rule_for(ExceptionGroup("", [down, ExceptionGroup("", [TimeoutError()])])) == OutageRule()
    assert rules.rule_for(caused(ValueError(), ExceptionGroup("", [TimeoutError()]))) == OutageRule()
    assert isinstance(rules.rule_for(ExceptionGroup("", [Declined(), Declined()])), BusinessRule)
    assert isinstance(rules.rule_for(ExceptionGroup("", [Refuse("no"), Refuse("no")])), BusinessRule)
    for other in (ValueError(), Refuse("no"), caused(Refuse("no"), TimeoutError())):
        assert rules.rule_for(ExceptionGroup("", [TimeoutError(), other])) is None
    deep: Exception = TimeoutError()
    for _ in range(5000):
        deep = ExceptionGroup("", [deep])
    assert rules.rule_for(deep) is None


@pytest.mark.req("OU-01")
def test_a_wait_is_found_in_a_group_and_among_its_causes() -> None:
    inner = caused(KeyError("x"), TimeoutError())
    group = ExceptionGroup("", [ValueError(), inner])
    assert [type(each) for each in members_of(group)] == [ExceptionGroup, ValueError, KeyError, TimeoutError]


@pytest.mark.req("OU-01")
def test_an_error_that_is_false_is_a_cause_like_any_other() -> None:
    class NoRows(LookupError):
        def __len__(self) -> int:
            return 0

    found = book(own={NoRows: business})
    assert found.rule_for(caused(ValueError(), NoRows())) == BusinessRule()
    assert found.rule_for(caused(NoRows(), TimeoutError())) == BusinessRule()
    assert RuleBook().rule_for(caused(NoRows(), TimeoutError())) == OutageRule()


@pytest.mark.req("OU-01")
def test_groups_that_failed_while_others_were_handled_are_looked_at_once() -> None:
    def call(mirrors: int, rounds: int) -> None:
        failed = []
        for mirror in range(mirrors):
            try:
                raise LookupError(mirror)
            except LookupError as error:
                failed.append(error)
        try:
            raise ExceptionGroup("no mirror has it", failed)
        except ExceptionGroup:
            if not rounds:
                raise
            call(mirrors, rounds - 1)

    with pytest.raises(ExceptionGroup) as caught:
        call(10, 15)
    before = time.thread_time()
    assert RuleBook().rule_for(caught.value) is None
    assert len(list(members_of(caught.value))) == 16 * 11
    assert time.thread_time() - before < 10


def test_a_chain_of_causes_that_is_a_circle_ends() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert RuleBook().rule_for(one) is None


@pytest.mark.req("OU-02")
def test_a_group_asks_for_its_longest_wait_if_it_asks_for_nothing_else() -> None:
    odd = RetryLater("odd")
    odd.delay = "soon"  # type: ignore[assignment]
    inner = ExceptionGroup("", [RetryLater("long", after="30s"), odd])
    asked = postponement_of(ExceptionGroup("", [RetryLater(after="2s"), inner]))
    assert asked is not None
    assert (str(asked), asked.delay) == ("long", 30.0)
    assert postponement_of(ExceptionGroup("", [inner, ValueError()])) is None
    deep: Exception = RetryLater()
    for _ in range(5000):
        deep = ExceptionGroup("", [deep])
    assert postponement_of(deep) is None


@pytest.mark.req("OU-02")
def test_the_two_errors_that_a_handler_raises_itself() -> None:
    refused = pickle.loads(pickle.dumps(Refuse("card declined")))
    assert (refused.category, refused.message) == (ExceptionCategory.BUSINESS, "card declined")
    later = pickle.loads(pickle.dumps(RetryLater(after="2m")))
    assert isinstance(later, Postponed)
    assert later.delay == 120.0
    assert RetryLater("quota", after=timedelta(seconds=3)).delay == 3.0
    for past in (0, -1, -0.5, timedelta(seconds=-3)):
        assert RetryLater("quota", after=past).delay == 0.0
    for misplaced in ("30s", 30, 0.5, timedelta(seconds=3)):
        with pytest.raises(
            ValueError, match=r"has the delay where the message goes; write RetryLater\(after="
        ):
            RetryLater(misplaced)  # type: ignore[arg-type]
    for wrong in ("soon", "2 weeks", float("nan"), True, None, "2d"):
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
            lambda: Onceward(failures={later: business}),
            "later, which is `async def`, so its answer would always",
        ),
        (lambda: Onceward(failures={lazy: business}), "lazy, which has a `yield`, so its answer would"),
        (lambda: Onceward(failures={RetryLater: outage()}), "for RetryLater, which says itself what becomes"),
        (lambda: Onceward(failures={(OSError, Refuse): retry("1s")}), "for Refuse, which says itself"),
        (
            lambda: Onceward(failures={lambda: True: business}),
            "which does not take one argument, the exception",
        ),
        (
            lambda: Onceward(dependencies={"payments": outage(of="mail")}),
            r"'payments' of app has a rule outage\(of='mail'\); leave of out",
        ),
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


@pytest.mark.req("OU-06")
def test_rules_are_shown_as_they_work() -> None:
    """A rule that says nothing about probes is that of its dependency."""
    app = Onceward("shop", dependencies={"payments": outage(probe_every="2s", after=5)})
    rules = {KeyError: outage(), ValueError: outage(after=7), OSError: business}

    @app.consumer("memory://a", depends_on=["payments"], failures=rules)
    def charge(order: dict[str, Any]) -> None: ...

    payments = "outage of payments after 5 messages in a row; probes every 2 s at first"
    assert app.consumers["charge"].failures.lines() == [
        f"KeyError: {payments}",
        "ValueError: outage of payments after 7 messages in a row; probes every 0.4 s at first",
        f"OSError: {business()}",
        f"connection errors, timeouts, HTTP 429, 502, 503 and 504: {payments}",
    ]


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
        (
            "memory://a",
            {"failures": {OSError: outage(of="payments")}},
            r"rule of charge for OSError is an outage of 'payments', on which charge does not depend; "
            r"add 'payments' to its depends_on: write depends_on=\['payments'\]",
        ),
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
    for wrong in ("soon", 0, -1, True, 10**400):
        with pytest.raises(ValueError, match="consumer 'billing': tolerates must be a positive duration"):
            contract(tolerates=wrong)
