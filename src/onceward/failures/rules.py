"""The rules that sort the failures of a handler: by exception type or predicate, to business, retry or outage.

The first rule that fits wins: those of the consumer, then those of the app, then the defaults, under which what looks
like an unreachable or overloaded service is an outage (`onceward.failures.signs`). A failure that no rule fits is left
to the policy of the consumer and the settings of its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from onceward._functions import is_async, takes_one, yields
from onceward.backoff import Backoff
from onceward.connectors.lease_rules import RedeliveryPlan
from onceward.durations import is_duration, is_past, parse_seconds
from onceward.errors import ConfigurationError
from onceward.failures.signs import is_sign_of_outage
from onceward.task.exceptions import (
    LONGEST_POSTPONEMENT,
    ExceptionCategory,
    Postponed,
    TransactionException,
    failure_category,
)

DEEPEST: Final = 20
"""Causes of an error that are looked at."""
PROBE_EVERY: Final = 0.4
"""Seconds. The interval grows to 1.2 seconds, so after a probe and the news of it, the rate is full within two."""
AFTER: Final = 3
GROWTH: Final = 1.5
"""By how much the interval between two probes grows."""
LONGEST: Final = 3.0
"""How many times its first value the interval becomes at most."""
PROBE_JITTER: Final = 0.2


class Refuse(TransactionException):
    """Raise it to reject a message permanently: `raise Refuse("card declined")`. It becomes a dead letter at once."""

    category: ExceptionCategory = ExceptionCategory.BUSINESS


class RetryLater(Postponed):
    """Raise it to have the message delivered again later: `raise RetryLater(after="30s")`.

    This is not a failure. It spends neither an attempt nor a delivery, so nothing but the handler ends it.
    """

    def __init__(self, message: str = "", after: Any = 1.0) -> None:
        """`after` that is zero or past, such as `deadline - now`, is as soon as can be."""
        if is_duration(message):
            raise ConfigurationError(
                f"RetryLater({message!r}) has the delay where the message goes; write RetryLater(after={message!r})"
            )
        seconds = 0.0 if is_past(after) else parse_seconds(after, "after", at_most=LONGEST_POSTPONEMENT)
        when = f"after {seconds:g} s" if seconds else "at once"
        super().__init__(message or f"asked to be delivered again {when}", seconds)


class BusinessRule(msgspec.Struct, frozen=True):
    """The message is wrong: it becomes a dead letter at once."""

    def __str__(self) -> str:
        return "business: a dead letter at once"


class RetryRule(msgspec.Struct, frozen=True):
    """The message is delivered again, at its own times."""

    redelivery: RedeliveryPlan

    def __str__(self) -> str:
        delays = ", ".join(f"{each:g} s" for each in self.redelivery.delays)
        return f"retry: {self.redelivery.times} more deliveries, after {delays}"


class OutageRule(msgspec.Struct, frozen=True, kw_only=True):
    """A service that the handler needs is down: the consumer waits, and nothing counts against the message."""

    probe_every: float = PROBE_EVERY
    """Seconds between two probes, at first."""
    after: int = AFTER
    """How many different messages in a row make an outage."""
    of: str | None = None
    """The dependency that is down."""

    @property
    def interval(self) -> Backoff:
        """Between two probes: never less than `probe_every`."""
        room = 1 / (1 - PROBE_JITTER)
        longest = max(self.probe_every * LONGEST, self.probe_every * room)
        return Backoff(self.probe_every * room, GROWTH, cap=longest, jitter=PROBE_JITTER)

    def __str__(self) -> str:
        what = "" if self.of is None else f" of {self.of}"
        return (
            f"outage{what} after {self.after} messages in a row; probes every {self.probe_every:g} s at first"
        )


Rule: TypeAlias = BusinessRule | RetryRule | OutageRule
Condition: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
Rules: TypeAlias = Mapping[Condition, Rule | Callable[[], BusinessRule]]
"""What a rule applies to, and the rule. `business` is one without being called."""


def business() -> BusinessRule:
    """A rule: the message becomes a dead letter at once, as if the handler had raised `Refuse`."""
    return BusinessRule()


def retry(*delays: Any, times: int | None = None) -> RetryRule:
    """A rule: deliver the message again after each of these delays, then bury it: `retry("5s", "1m", "10m")`.

    `times` is how many further deliveries there are, if the last delay repeats: `retry("5s", "1m", times=20)`. Delays
    are numbers of seconds, texts such as "5s", "1m" and "2h", or timedeltas; up to a fifth is added at random.
    """
    if not delays:
        raise ConfigurationError("retry needs a delay: write retry('5s', '1m'), or retry('30s', times=10)")
    seconds = tuple(parse_seconds(each, "a delay of retry", at_most=LONGEST_POSTPONEMENT) for each in delays)
    number: Any = len(seconds) if times is None else times
    if type(number) is not int or number < len(seconds):
        raise ConfigurationError(
            f"retry has {len(seconds)} delays, so times must be {len(seconds)} or more, not {times!r}"
        )
    return RetryRule(RedeliveryPlan(seconds, number))


def outage(*, probe_every: Any = PROBE_EVERY, after: int = AFTER, of: str | None = None) -> OutageRule:
    """A rule: a service that the handler needs is down. When `after` different messages in a row fail like this, the
    consumer stops fetching, returns the messages it has, and tries one message every `probe_every`, an interval that
    grows threefold, until one succeeds. During that time it counts no attempt and no delivery. `of` names the
    dependency that is down: all consumers that depend on it wait together.
    """
    number: Any = after
    if type(number) is not int or number < 1:
        raise ConfigurationError(
            f"outage: after must be 1 or more different messages, not {after!r}; write outage(after=3)"
        )
    if of is not None and (not isinstance(of, str) or not of.strip()):
        raise ConfigurationError(
            f"outage: of must be the name of a dependency, not {of!r}; write of='payments'"
        )
    seconds = parse_seconds(probe_every, "probe_every", at_most=LONGEST_POSTPONEMENT)
    return OutageRule(probe_every=seconds, after=number, of=of)


def check_rules(given: Any, owner: str) -> dict[Condition, Rule]:
    """Return the rules of an app or a consumer, or raise ConfigurationError."""
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"the failures of {owner} must be a dict of rules, not {type(given).__name__}; write "
            "failures={CardDeclined: business, ConnectionError: outage()}"
        )
    rules = {condition: rule() if rule is business else rule for condition, rule in given.items()}
    for condition, rule in rules.items():
        _check_condition(condition, owner)
        if not isinstance(rule, BusinessRule | RetryRule | OutageRule):
            raise ConfigurationError(
                f"the rule of {owner} for {name_of(condition)} must be business, retry(…) or outage(…), not {rule!r}"
                + (f"; write {rule.__name__}(…)" if rule in (retry, outage) else "")
            )
    return rules


def _check_condition(condition: Any, owner: str) -> None:
    kinds = condition if isinstance(condition, tuple) else (condition,)
    if not kinds:
        raise ConfigurationError(
            f"a rule of {owner} is for no exception type at all; name one, or leave it out"
        )
    for each in kinds:
        if isinstance(each, type) and issubclass(each, BaseException) and not issubclass(each, Exception):
            raise ConfigurationError(
                f"a rule of {owner} is for {each.__name__}, which ends a process and is not a failure of a message; "
                "leave it out, or write a subclass of Exception"
            )
        if isinstance(each, type) and issubclass(each, (Refuse, Postponed)):
            raise ConfigurationError(
                f"a rule of {owner} is for {each.__name__}, which says itself what becomes of the message; leave the "
                "rule out, or raise an exception of your own"
            )
        is_kind = isinstance(each, type) and issubclass(each, Exception)
        is_predicate = callable(each) and not isinstance(each, type) and kinds == (condition,)
        if not is_kind and not is_predicate:
            raise ConfigurationError(
                f"a rule of {owner} is for {each!r}, which is neither an exception type nor a function of an "
                "exception; write failures={ValueError: business}"
            )
        if is_predicate and is_async(each):
            raise ConfigurationError(
                f"a rule of {owner} is for {name_of(each)}, which is `async def`, so its answer would always be yes; "
                "make it a plain `def`"
            )
        if is_predicate and yields(each):
            raise ConfigurationError(
                f"a rule of {owner} is for {name_of(each)}, which has a `yield`, so its answer would always be yes; "
                "remove the `yield`"
            )
        if is_predicate and not takes_one(each):
            raise ConfigurationError(
                f"a rule of {owner} is for {name_of(each)}, which does not take one argument, the exception"
            )


def check_dependencies(given: Any, owner: str) -> dict[str, OutageRule]:
    """Return the dependencies of an app by name, or raise ConfigurationError."""
    named = (
        given
        if isinstance(given, Mapping)
        else dict.fromkeys(_names(given, "dependencies", owner), OutageRule())
    )
    for name, rule in named.items():
        _names([name], "dependencies", owner)
        if not isinstance(rule, OutageRule):
            raise ConfigurationError(
                f"the dependency {name!r} of {owner} must have a rule outage(…), not {rule!r}; write "
                f"dependencies={{{name!r}: outage(probe_every='5s')}}"
            )
        if rule.of not in (None, name):
            raise ConfigurationError(
                f"the dependency {name!r} of {owner} has a rule outage(of={rule.of!r}); leave of out, or declare "
                f"{rule.of!r} as a dependency of its own"
            )
    return {name: msgspec.structs.replace(rule, of=name) for name, rule in named.items()}


def check_names(given: Any, known: Mapping[str, OutageRule], rules: Rules, owner: str) -> tuple[str, ...]:
    """Return the names of what a consumer depends on, or raise ConfigurationError: all must be known to the app."""
    names = _names(given, "depends_on", owner)
    declared = ", ".join(map(repr, known)) or "none"
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"{owner} depends on {name!r}, which the app does not declare; it declares {declared}: write "
                f"Onceward(…, dependencies=[{name!r}])"
            )
    for rule in rules.values():
        if isinstance(rule, OutageRule) and rule.of is not None and rule.of not in known:
            raise ConfigurationError(
                f"a rule of {owner} is an outage of {rule.of!r}, which the app does not declare; it declares "
                f"{declared}: write Onceward(…, dependencies=[{rule.of!r}])"
            )
    return names


def _names(given: Any, field: str, owner: str) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence | set | frozenset | Mapping):
        raise ConfigurationError(
            f"{field} of {owner} must be a list of names, not {given!r}; write {field}=['payments']"
        )
    for name in given:
        if not isinstance(name, str) or not name.strip() or name != name.strip():
            raise ConfigurationError(f"{field} of {owner} must be names such as 'payments', not {name!r}")
    return tuple(dict.fromkeys(given))


class RuleBook(msgspec.Struct, frozen=True, kw_only=True):
    """All rules that apply to one consumer."""

    own: Mapping[Condition, Rule] = {}
    of_app: Mapping[Condition, Rule] = {}
    depends_on: tuple[str, ...] = ()
    dependencies: Mapping[str, OutageRule] = {}
    """Those of the app, by name."""

    @classmethod
    def of(
        cls,
        consumer: str,
        own: Mapping[Condition, Rule],
        depends_on: tuple[str, ...],
        of_app: Mapping[Condition, Rule],
        dependencies: Mapping[str, OutageRule],
    ) -> RuleBook:
        """Raises ConfigurationError if the consumer has a rule for an outage of what it does not depend on."""
        for condition, rule in own.items():
            if isinstance(rule, OutageRule) and rule.of is not None and rule.of not in depends_on:
                raise ConfigurationError(
                    f"the rule of {consumer} for {name_of(condition)} is an outage of {rule.of!r}, on which {consumer} "
                    f"does not depend; add {rule.of!r} to its depends_on: write "
                    f"depends_on={[*depends_on, rule.of]!r}"
                )
        return cls(own=own, of_app=of_app, depends_on=depends_on, dependencies=dependencies)

    def rule_for(self, error: BaseException) -> Rule | None:
        """The rule for a failure; None if there is none, or the handler itself says what it is."""
        for rules in (self.own, self.of_app):
            for condition, rule in rules.items():
                if _is_so(error, partial(_fits, condition)):
                    return rule
        refused = [failure_category(each) is ExceptionCategory.BUSINESS for each in _leaves_of(error)]
        if any(refused):
            return BusinessRule() if isinstance(error, BaseExceptionGroup) and all(refused) else None
        return OutageRule() if _is_so(error, is_sign_of_outage) else None

    def dependency_of(self, rule: OutageRule) -> str | None:
        """What an outage under this rule is an outage of; None for the consumer alone: also if a rule of the app names
        what this consumer does not depend on."""
        if rule.of is not None:
            return rule.of if rule.of in self.depends_on else None
        return self.depends_on[0] if len(self.depends_on) == 1 else None

    def complete(self, rule: OutageRule) -> OutageRule:
        """The rule itself; under the default one, that of the dependency."""
        dependency = rule.of or self.dependency_of(rule)
        says_nothing = msgspec.structs.replace(rule, of=None) == OutageRule()
        return self.dependencies[dependency] if dependency is not None and says_nothing else rule

    def retries(self) -> list[tuple[str, RetryRule]]:
        """The rules that redeliver, with what they are for."""
        rules = [*self.own.items(), *self.of_app.items()]
        return [(name_of(condition), rule) for condition, rule in rules if isinstance(rule, RetryRule)]

    def lines(self) -> list[str]:
        """The rules in words, first ones first."""
        found = [
            f"{name_of(condition)}: {self._as_it_works(rule)}"
            for rules in (self.own, self.of_app)
            for condition, rule in rules.items()
        ]
        default = self._as_it_works(OutageRule())
        return [*found, f"connection errors, timeouts, HTTP 429, 502, 503 and 504: {default}"]

    def _as_it_works(self, rule: Rule | Callable[[], BusinessRule]) -> Any:
        if not isinstance(rule, OutageRule):
            return rule
        return msgspec.structs.replace(self.complete(rule), of=self.dependency_of(rule))


def _fits(condition: Condition, error: BaseException) -> bool:
    if isinstance(condition, type | tuple):
        return isinstance(error, condition)
    return bool(condition(error))


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from or while handling, each once."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen and len(seen) < DEEPEST:
        seen.add(id(each))
        yield each
        earlier = None if each.__suppress_context__ else each.__context__
        # An error may be false: it may have a length.
        each = earlier if each.__cause__ is None else each.__cause__


def members_of(
    error: BaseException, depth: int = DEEPEST, seen: set[int] | None = None
) -> Iterator[BaseException]:
    """The error and its causes; those of the members of a group, too. Each once: what was raised while a group was
    handled has it as its context, and there may be groups of that."""
    seen = set() if seen is None else seen
    for each in causes_of(error):
        if id(each) in seen:
            return
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup) and depth:
            for member in each.exceptions:
                yield from members_of(member, depth - 1, seen)


def _leaves_of(error: BaseException, depth: int = DEEPEST) -> Iterator[BaseException]:
    """The members of a group, and of groups in it; an error that is no group itself."""
    if isinstance(error, BaseExceptionGroup) and depth:
        for member in error.exceptions:
            yield from _leaves_of(member, depth - 1)
    else:
        yield error


def _is_so(
    error: BaseException,
    condition: Callable[[BaseException], bool],
    depth: int = DEEPEST,
    known: dict[int, bool] | None = None,
) -> bool:
    """Whether the condition is true of the error or a cause of it. A group is what all of its members are: one of
    several that failed together does not decide for the others. `known` is what was found out on the way: the members
    of a group may have the same causes."""
    known = {} if known is None else known
    if id(error) not in known:
        known[id(error)] = False  # until the answer is known, for a circle
        known[id(error)] = any(
            condition(each)
            or (
                isinstance(each, BaseExceptionGroup)
                and depth > 0
                and all(_is_so(member, condition, depth - 1, known) for member in each.exceptions)
            )
            for each in causes_of(error)
        )
    return known[id(error)]


def name_of(condition: Any) -> str:
    """What a rule is for, in words."""
    if isinstance(condition, tuple):
        return " or ".join(map(name_of, condition))
    return str(getattr(condition, "__qualname__", None) or type(condition).__qualname__)
