"""The scenarios, each a function of the trial. The docstring of its module says what it tries."""

from __future__ import annotations

from collections.abc import Callable

from onceward.inbox.evidence.evidence import DUPLICATES, REPLAY
from onceward.verify import report
from onceward.verify.scenarios.clean import clean
from onceward.verify.scenarios.duplicates import at_once, in_processes, in_series, replay
from onceward.verify.scenarios.effects import early_effects, outside_calls
from onceward.verify.scenarios.exceptions import exceptions
from onceward.verify.scenarios.forms import missing_fields, old_versions, refused_events, unknown_fields
from onceward.verify.scenarios.kills import kills
from onceward.verify.scenarios.order import order
from onceward.verify.scenarios.state import state
from onceward.verify.trial import Assessment, Trial

Scenario = Callable[[Trial], Assessment]

SCENARIOS: dict[str, Scenario] = {
    report.CLEAN: clean,
    DUPLICATES: in_series,
    report.AT_ONCE: at_once,
    report.IN_PROCESSES: in_processes,
    REPLAY: replay,
    report.ORDER: order,
    report.UNKNOWN_FIELDS: unknown_fields,
    report.MISSING_FIELDS: missing_fields,
    report.OLD_VERSIONS: old_versions,
    report.REFUSED: refused_events,
    report.EXCEPTIONS: exceptions,
    report.KILLS: kills,
    report.STATE: state,
    report.EARLY_EFFECTS: early_effects,
    report.OUTSIDE_CALLS: outside_calls,
}
NEEDS_NO_ORACLE = (report.CLEAN, report.EARLY_EFFECTS, report.OUTSIDE_CALLS)
"""Scenarios that run even if a clean delivery fails."""
