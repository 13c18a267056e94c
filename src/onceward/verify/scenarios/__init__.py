"""The scenarios, each a function of the trial. The docstring of its module says what it tries."""

from __future__ import annotations

from collections.abc import Callable

from onceward.inbox.evidence.scenarios import CLEAN, DUPLICATES, INTERPRETERS, REPLAY
from onceward.verify.scenarios.clean import clean
from onceward.verify.scenarios.duplicates import at_once, in_processes, in_series, replay
from onceward.verify.scenarios.effects import early_effects, outside_calls
from onceward.verify.scenarios.every_type import every_type
from onceward.verify.scenarios.exceptions import exceptions
from onceward.verify.scenarios.forms import missing_fields, old_versions, refused_events, unknown_fields
from onceward.verify.scenarios.groups import groups
from onceward.verify.scenarios.interpreters import interpreters
from onceward.verify.scenarios.kills import kills
from onceward.verify.scenarios.lost_updates import lost_updates
from onceward.verify.scenarios.order import order
from onceward.verify.scenarios.sends import sends
from onceward.verify.scenarios.side_by_side import side_by_side
from onceward.verify.scenarios.state import state
from onceward.verify.trial import Assessment, Trial

Scenario = Callable[[Trial], Assessment]

SCENARIOS: dict[str, Scenario] = {
    CLEAN: clean,
    "every-type": every_type,
    DUPLICATES: in_series,
    "duplicates-at-once": at_once,
    "duplicates-in-processes": in_processes,
    REPLAY: replay,
    "order": order,
    "lost-updates": lost_updates,
    "side-by-side": side_by_side,
    "unknown-fields": unknown_fields,
    "missing-fields": missing_fields,
    "old-versions": old_versions,
    "refused": refused_events,
    "exceptions": exceptions,
    "kills": kills,
    "sends": sends,
    "groups": groups,
    INTERPRETERS: interpreters,
    "state": state,
    "early-effects": early_effects,
    "outside-calls": outside_calls,
}
NEEDS_NO_ORACLE = (CLEAN, "early-effects", "outside-calls")
"""Scenarios that run even if a clean delivery fails."""
