"""Evidence as a verification of a consumer would give it, without the verification."""

from __future__ import annotations

from typing import Any

from onceward.inbox.evidence.code_digest import code_of
from onceward.inbox.evidence.distributions import versions_in_use
from onceward.inbox.evidence.evidence import Checked, Evidence, terms_of
from onceward.inbox.evidence.scenarios import NAMES
from tests.verification import consumers

GOOD = tuple(Checked(name, "inapplicable" if name == "old-versions" else "passed") for name in NAMES)


def with_results(**results: str) -> tuple[Checked, ...]:
    return tuple(Checked(each.scenario, results.get(each.scenario, each.result)) for each in GOOD)


def proof(consumer: Any = consumers.Right, **changes: Any) -> Evidence:
    code = code_of(consumer, consumer.contract)
    backend = changes.get("backend", "sqlite")
    facts: dict[str, Any] = {
        "consumer_id": consumer.contract.consumer_id,
        "subject": f"{consumer.__module__}:{consumer.__qualname__}",
        "tested": GOOD,
        "code": code,
        "event_types": tuple(consumer.contract.event_types),
        "terms": terms_of(consumer.contract),
        "dependencies": versions_in_use(code.packages, backend),
        "schema_versions": (1,),
        "backend": backend,
        "isolation": "read committed" if backend == "postgresql" else "",
        "commit": "group" if backend == "sqlite" else "each",
        "mechanism": "bill and dedup record in one transaction",
        "onceward": "0",
        "seed": 1,
    }
    return Evidence(**{**facts, **changes})
