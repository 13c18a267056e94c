"""The gate before production: a consumer runs there only with evidence that its code keeps the contract.

`onceward verify --record` writes the evidence as one row in one statement, so it is complete or absent. Outside
production nothing is checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec

from onceward.db.transaction import DbTransaction
from onceward.inbox.contract import Contract
from onceward.inbox.errors import UnprovenConsumerError
from onceward.inbox.evidence.code_digest import Code, code_from, code_of, module_of
from onceward.inbox.stores.base import Store

VARIABLE = "ONCEWARD_ENV"
PRODUCTION = ("production", "prod")

DUPLICATES = "duplicates"
REPLAY = "replay"
REQUIRED = (DUPLICATES, REPLAY)
"""Scenarios that evidence must include, however well the others went."""

_RECORD = """
    INSERT INTO onceward_evidence (evidence_id, consumer_id, recorded_at, passed, code_digest, evidence)
    VALUES (:id, :consumer, {now}, :passed, :digest, :evidence)
"""
_RECORDED = """
    SELECT evidence, recorded_at FROM onceward_evidence WHERE consumer_id = :consumer
    ORDER BY recorded_at DESC, evidence_id DESC
"""


class Checked(msgspec.Struct, frozen=True):
    """A scenario and its result."""

    scenario: str
    result: str
    """`passed`, `failed`, or `skipped` if it does not apply or was left out."""
    note: str = ""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one verification."""

    consumer_id: str
    subject: str
    """The consumer, as `module:name`."""
    tested: tuple[Checked, ...]
    code: Code
    schema_versions: tuple[int, ...]
    """Of the samples; the last is the contract's."""
    backend: str
    mechanism: str
    onceward: str
    """The version of this package."""
    seed: int
    evidence_id: str = msgspec.field(default_factory=lambda: uuid4().hex)
    recorded_at: float = 0.0
    """Seconds since 1970; set when recorded."""

    @property
    def passed(self) -> bool:
        return bool(self.tested) and all(each.result != "failed" for each in self.tested)


def is_production(env: str | None) -> bool:
    """Whether this is production, by the parameter if given, otherwise by the environment."""
    named = os.environ.get(VARIABLE, "") if env is None else env
    return named.strip().lower() in PRODUCTION


def record_evidence(transaction: DbTransaction, store: Store, evidence: Evidence) -> None:
    store.run(
        transaction,
        _RECORD,
        id=evidence.evidence_id,
        consumer=evidence.consumer_id,
        passed=evidence.passed,
        digest=evidence.code.digest,
        evidence=msgspec.json.encode(evidence).decode(),
    )


def read_evidence(transaction: DbTransaction, store: Store, consumer_id: str) -> list[Evidence]:
    """Return all evidence about a consumer, newest first."""
    rows = store.run(transaction, _RECORDED, consumer=consumer_id)
    return [
        msgspec.structs.replace(msgspec.json.decode(row.evidence, type=Evidence), recorded_at=row.recorded_at)
        for row in rows
    ]


class EvidenceGate:
    """Admits consumers with valid evidence. Queries the database once for each."""

    def __init__(self, store: Store, env: str | None) -> None:
        self._store = store
        self._shut = is_production(env)
        self._passed: set[tuple[str, Any]] = set()

    async def check(self, contract: Contract, code: Any, ask: Callable[..., Any]) -> None:
        """Raise `UnprovenConsumerError` without valid evidence. `code` is the consumer's class, or the handler."""
        if not self._shut or (contract.consumer_id, module_key(code)) in self._passed:
            return
        found = await ask(read_evidence, self._store, contract.consumer_id)
        problem = lacking(contract, code, found)
        if problem is not None:
            raise UnprovenConsumerError(refusal(contract, code, problem))
        self._passed.add((contract.consumer_id, module_key(code)))


def module_key(code: Any) -> Any:
    """Return a class itself, but the module of a handler, which may be a new object for each event."""
    return code if isinstance(code, type) else module_of(code)


def lacking(contract: Contract, code: Any, found: list[Evidence]) -> str | None:
    """Return what is missing, or None. `found` is newest first; the newest evidence for the current code counts."""
    if not contract.idempotency_mechanism.strip():
        return "its idempotency_mechanism is empty"
    if not found:
        return "no verification of it is recorded in this database"
    for each in found:
        if _is_about(each, contract, code):
            return _flaw(each, contract)
    last = found[0]
    when = datetime.fromtimestamp(last.recorded_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    if not isinstance(code, type) and module_of(code) not in last.code.modules:
        return (
            f"its handler is in {module_of(code)}, which the verification of {when} did not cover: it verified "
            f"{last.subject}"
        )
    return f"its code has changed since it was verified ({when})"


def _is_about(evidence: Evidence, contract: Contract, code: Any) -> bool:
    if isinstance(code, type):
        return evidence.code.digest == code_of(code, contract).digest
    # A handler must be in the verified code, and all of that code must be unchanged.
    return (
        module_of(code) in evidence.code.modules
        and evidence.code.digest == code_from(evidence.code.roots).digest
    )


def _flaw(evidence: Evidence, contract: Contract) -> str | None:
    failed = [each.scenario for each in evidence.tested if each.result == "failed"]
    if failed:
        return f"its verification failed: {', '.join(failed)}"
    passed = {each.scenario for each in evidence.tested if each.result == "passed"}
    missing = [name for name in REQUIRED if name not in passed]
    if missing:
        return f"its verification did not include {' and '.join(missing)}"
    if not evidence.mechanism.strip():
        return "its verification was recorded without a description of its idempotency mechanism"
    if contract.schema_version not in evidence.schema_versions:
        versions = ", ".join(map(str, evidence.schema_versions))
        return f"its verification covered schema version {versions}, but this is {contract.schema_version}"
    return None


def refusal(contract: Contract, code: Any, problem: str) -> str:
    name = getattr(code, "__qualname__", "")
    subject = f"{module_of(code)}:{name}" if name and "<" not in name else "MODULE:NAME"
    return (
        f"consumer {contract.consumer_id!r} does not run in production: {problem}. "
        f"Record evidence with `onceward verify {subject} --record` (and --database URL, unless an app names it)"
    )
