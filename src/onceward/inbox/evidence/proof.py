"""Whether evidence proves a consumer as it is here and now, and if not, why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from onceward._text import quantity
from onceward.inbox.commits.group import commit_of
from onceward.inbox.contract import EVERY_TYPE, Contract
from onceward.inbox.evidence.code_digest import Code, code_from, code_of, module_of
from onceward.inbox.evidence.distributions import versions_in_use
from onceward.inbox.evidence.evidence import FAILED, SKIPPED, TERMS, Evidence, terms_of
from onceward.inbox.evidence.scenarios import NAMES

MOST_NAMED = 5
"""How many changes a message lists."""

_OLD = "its verification ({when}) is from an earlier onceward, which did not record dependencies; verify it again"


def lacking(
    contract: Contract,
    code: Any,
    found: Sequence[Evidence],
    backend: str,
    where: str = "in this database",
    isolation: str | None = None,
) -> str | None:
    """Return why nothing in `found` proves the consumer on this database kind, or None if something does.

    `code` is its class, or its handler. `found` is newest first; the newest about what runs here counts. `where` is
    where it was found, `isolation` the level of the consumer's transactions, None if it is unknown or the only one.
    """
    if not contract.idempotency_mechanism.strip():
        return "its idempotency_mechanism is empty"
    if not found:
        return f"no verification of it is recorded {where}"
    subject = _Subject(contract, code, backend, isolation)
    elsewhere = []
    for each in found:
        problem = subject.surroundings_problem(each) if subject.is_about_this(each) else None
        if problem is None and subject.is_about_this(each):
            return _flaw(each, contract)
        elsewhere += [problem] if problem else []
    return elsewhere[0] if elsewhere else subject.code_problem(found[0])


class _Subject:
    """A consumer as it is here and now."""

    def __init__(self, contract: Contract, code: Any, backend: str, isolation: str | None) -> None:
        self._contract = contract
        self._code = code
        self._backend = backend
        self._isolation = isolation
        self._known: dict[Any, Code] = {}

    def is_about_this(self, evidence: Evidence) -> bool:
        """Whether it is about the code that is here, whatever surrounds it."""
        current = self._current(evidence)
        return self._covers(evidence) and bool(current.sources) and evidence.code.digest == current.digest

    def code_problem(self, evidence: Evidence) -> str:
        """What has changed since the evidence was recorded."""
        when = _when(evidence)
        if not evidence.terms:
            return _OLD.format(when=when)
        if not self._current(evidence).sources:
            return "its source cannot be read here, so nothing shows that it is what was verified"
        if not self._covers(evidence):
            if isinstance(self._code, type):
                return f"the verification of {when} was of {evidence.subject}"
            return (
                f"its handler is in {module_of(self._code)}, which the verification of {when} did not cover: it "
                f"verified {evidence.subject}"
            )
        changes = _listed(_changed_modules(evidence.code.sources, self._current(evidence).sources))
        return f"its code has changed since it was verified ({when}){changes}"

    def surroundings_problem(self, evidence: Evidence) -> str | None:
        """Why the evidence is about the same code in other surroundings."""
        when = _when(evidence)
        if not evidence.terms:
            return _OLD.format(when=when)
        if evidence.backend != self._backend:
            return f"it was verified on {evidence.backend} ({when}), and this is {self._backend}"
        if self._isolation is not None and evidence.isolation != self._isolation:
            return _other_isolation(evidence, self._isolation)
        commit = commit_of(self._code, self._contract, self._backend)
        if isinstance(self._code, type) and evidence.commit != commit:
            how = {"each": "one by one", "group": "in groups", "batch": "in batches"}
            then = how[evidence.commit]
            return f"its events were committed {then} when it was verified ({when}), and {how[commit]} here"
        now = versions_in_use(self._current(evidence).packages, self._backend)
        changes = _listed(_changed_versions(evidence.dependencies, now))
        return f"a dependency has changed since it was verified ({when}){changes}" if changes else None

    def _covers(self, evidence: Evidence) -> bool:
        """A class must be the verified one; a handler must be in the verified code."""
        if isinstance(self._code, type):
            return evidence.subject.partition(":")[2] == self._code.__qualname__
        return module_of(self._code) in evidence.code.sources

    def _current(self, evidence: Evidence) -> Code:
        key = evidence.code.roots, evidence.code.modules
        if key not in self._known:
            also = frozenset(evidence.code.modules)
            self._known[key] = (
                code_of(self._code, self._contract, also)
                if isinstance(self._code, type)
                else code_from(evidence.code.roots, also)
            )
        return self._known[key]


def _other_isolation(evidence: Evidence, here: str) -> str:
    when = _when(evidence)
    if not evidence.isolation:
        return (
            f"its verification ({when}) is from an earlier onceward, which did not record the isolation level"
        )
    return (
        f"it was verified with the isolation level {evidence.isolation!r} ({when}), and its transactions have "
        f"{here!r} here, where other updates are lost or fail; use one level in both, such as "
        "?options=-c%20default_transaction_isolation=serializable in the URLs"
    )


def _flaw(evidence: Evidence, contract: Contract) -> str | None:
    problems: tuple[Callable[[Evidence, Contract], str | None], ...] = (
        _scenario_problem,
        _mechanism_problem,
        _type_problem,
        _contract_problem,
    )
    return next(filter(None, (problem(evidence, contract) for problem in problems)), None)


def _scenario_problem(evidence: Evidence, _: Contract) -> str | None:
    results = {each.scenario: each.result for each in evidence.tested}
    if failed := [name for name, result in results.items() if result == FAILED]:
        return f"its verification failed: {', '.join(failed)}"
    if skipped := [name for name, result in results.items() if result == SKIPPED]:
        return f"its verification skipped {', '.join(skipped)}, and a partial verification proves nothing"
    if missing := [name for name in NAMES if name not in results]:
        return f"its verification did not include {', '.join(missing)}"
    return None


def _mechanism_problem(evidence: Evidence, _: Contract) -> str | None:
    if evidence.mechanism.strip():
        return None
    return "its verification was recorded without a description of its idempotency mechanism"


def _type_problem(evidence: Evidence, contract: Contract) -> str | None:
    if contract.event_types[0] == EVERY_TYPE:
        if EVERY_TYPE in evidence.terms["event_types"]:
            return None
        proven = ", ".join(evidence.terms["event_types"])
        return f"its contract accepts every event type, but it was verified for {proven}"
    missing = types_without_sample(contract, evidence.event_types)
    return f"its verification had no event of type {', '.join(missing)}" if missing else None


def types_without_sample(contract: Contract, samples: Iterable[str]) -> tuple[str, ...]:
    """The event types of a contract that no sample has."""
    there = {*samples, EVERY_TYPE}
    return tuple(each for each in contract.event_types if each not in there)


def _contract_problem(evidence: Evidence, contract: Contract) -> str | None:
    if contract.schema_version not in evidence.schema_versions:
        versions = ", ".join(map(str, evidence.schema_versions))
        return f"its verification covered schema version {versions}, but this is {contract.schema_version}"
    now = terms_of(contract)
    changed = [name for name in TERMS if evidence.terms.get(name) != now[name]]
    return f"its contract has changed since it was verified: {', '.join(changed)}" if changed else None


# ── text ────────────────────────────────────────────────────────────────────────────────────────────────


def refusal(contract: Contract, code: Any, problem: str) -> str:
    return f"consumer {contract.consumer_id!r} does not run in production: {problem}. {remedy(code)}"


def remedy(code: Any) -> str:
    return (
        f"Record evidence with `onceward verify {_name_of(code)} --record` "
        "(and --database URL, unless an app names it), or ship it: `--out evidence.json`"
    )


def _name_of(code: Any) -> str:
    name = getattr(code, "__qualname__", "")
    return f"{module_of(code)}:{name}" if name and "<" not in name else "MODULE:NAME"


def _when(evidence: Evidence) -> str:
    return datetime.fromtimestamp(evidence.recorded_at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _changed_modules(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    yield from (name for name in now if name in then and then[name] != now[name])
    yield from (f"{name} is new" for name in now if name not in then)
    yield from (f"{name} is missing" for name in then if name not in now)


def _changed_versions(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*then, *now}):
        if name not in now:
            yield f"{name} {then[name]} is not installed"
        elif name not in then:
            yield f"{name} {now[name]} is new"
        elif then[name] != now[name]:
            yield f"{name} {then[name]} is now {now[name]}"


def _listed(changes: Iterable[str]) -> str:
    found = list(changes)
    more = len(found) - MOST_NAMED
    named = [*found[:MOST_NAMED], *([f"{quantity(more, 'more change')}"] if more > 0 else [])]
    return f": {', '.join(named)}" if found else ""
