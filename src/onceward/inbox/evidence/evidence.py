"""The record of a verification, and where the inbox keeps it.

`onceward verify --record` writes it as one row in one statement, so it is complete or absent. `file` carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

import msgspec

from onceward.db.transaction import DbTransaction
from onceward.inbox.contract import Contract
from onceward.inbox.evidence.code_digest import Code
from onceward.inbox.evidence.modules import SCRIPT, canonical_name
from onceward.inbox.stores.base import Store

PASSED: Final = "passed"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"
INAPPLICABLE: Final = "inapplicable"
PARTIAL: Final = "partial"

TERMS: Final = ("mode", "schema_version", "upcasters", "model", "sequencing", "first_sequence")
"""The fields of a contract that a verification depends on. Event types and database kind have rules of their own."""

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
    """`passed`, `failed`, `skipped` if it was left out or could not run, `inapplicable` if it does not apply."""
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
    """The database kind: `sqlite` or `postgresql`."""
    isolation: str = ""
    """The isolation level of the scenarios on PostgreSQL, such as `read committed`. SQLite has one only."""
    commit: str = "each"
    """How its events were committed: `each` by itself, or those that wait together as a `group`."""
    mechanism: str
    onceward: str
    """The version of this package."""
    seed: int
    event_types: tuple[str, ...] = ()
    """Of the samples."""
    terms: Mapping[str, Any] = {}
    """What the contract promised: its event types and the fields in `TERMS`."""
    dependencies: Mapping[str, str] = {}
    """What identifies each distribution in use, by its name."""
    evidence_id: str = msgspec.field(default_factory=lambda: uuid4().hex)
    recorded_at: float = 0.0
    """Seconds since 1970; set when recorded."""

    @property
    def passed(self) -> bool:
        return self.result != FAILED

    @property
    def result(self) -> str:
        """`passed`, `failed`, or `partial` if scenarios were left out."""
        results = {each.result for each in self.tested}
        if FAILED in results or not results:
            return FAILED
        return PARTIAL if SKIPPED in results else PASSED


def terms_of(contract: Contract) -> dict[str, Any]:
    """As they are in JSON. A script's own code has its import name, as in a digest."""
    row = contract.as_row()
    terms = msgspec.json.encode({name: row[name] for name in ("event_types", *TERMS)}).decode()
    found: dict[str, Any] = msgspec.json.decode(terms.replace(f'"{SCRIPT}:', f'"{canonical_name(SCRIPT)}:'))
    return found


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
