"""The scenarios, each a function of the trial. The module says what it tries."""

from __future__ import annotations

from collections.abc import Callable

from onceward.inbox.evidence.evidence import DUPLICATES, REPLAY
from onceward.testing.contract import names
from onceward.testing.contract.scenarios.clean import clean
from onceward.testing.contract.scenarios.duplicates import at_once, in_processes, in_series, replay
from onceward.testing.contract.scenarios.effects import early_effects, outside_calls
from onceward.testing.contract.scenarios.exceptions import exceptions
from onceward.testing.contract.scenarios.forms import missing_fields, old_versions, refused, unknown_fields
from onceward.testing.contract.scenarios.kills import kills
from onceward.testing.contract.scenarios.order import order
from onceward.testing.contract.scenarios.state import state
from onceward.testing.contract.trial import Trial, Tried

Scenario = Callable[[Trial], Tried]

SCENARIOS: dict[str, Scenario] = {
    names.CLEAN: clean,
    DUPLICATES: in_series,
    names.AT_ONCE: at_once,
    names.IN_PROCESSES: in_processes,
    REPLAY: replay,
    names.ORDER: order,
    names.UNKNOWN_FIELDS: unknown_fields,
    names.MISSING_FIELDS: missing_fields,
    names.OLD_VERSIONS: old_versions,
    names.REFUSED: refused,
    names.EXCEPTIONS: exceptions,
    names.KILLS: kills,
    names.STATE: state,
    names.EARLY_EFFECTS: early_effects,
    names.OUTSIDE_CALLS: outside_calls,
}
NEEDS_NO_ORACLE = (names.CLEAN, names.EARLY_EFFECTS, names.OUTSIDE_CALLS)
"""Scenarios that say something even if a clean delivery fails."""
