"""One instance for all events, then for all of them again on another database: it must not remember anything."""

from __future__ import annotations

from typing import Any

from onceward.verify.report import Finding
from onceward.verify.rows import tables
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, Trial, deliver_all, unsettled

_OURS = (
    "probe_of_verification",
    "process_transaction",
    "handle_transaction_success",
    "handle_transaction_exception",
)
_ENGINES = ("_engine_state", "connectors", "services")


def state(trial: Trial) -> Assessment:
    def act(stage: Stage) -> tuple[tables.Rows, list[Delivery], tables.Rows, list[Delivery], list[str]]:
        task = stage.instance()
        before = _snapshot(task)
        deliveries = deliver_all(stage, trial.plan.events, task=task)
        rows = stage.rows(trial.tables)
        changed = [name for name, value in _snapshot(task).items() if before.get(name) != value]

        def repeat(other: Stage) -> list[Delivery]:
            other.adopt(task)
            return deliver_all(other, trial.plan.events, task=task)

        again, rows_again = trial.on_fresh_database(stage, repeat)
        return rows, deliveries, rows_again, again, changed

    rows, deliveries, rows_again, again, changed = trial.perform(act).value
    names = f": {', '.join(changed)}" if changed else ""
    hint = f"state that the consumer keeps on self, on its class or in a module changes the outcome{names}"
    story = "with one instance for all events"
    findings = unsettled(story, deliveries) + _compare(trial, story, hint, rows)
    story = "with an instance that has done the same events before, on another database"
    findings += unsettled(story, again) + _compare(trial, story, hint, rows_again)
    return Assessment(findings, "one instance, all events, twice")


def _compare(trial: Trial, story: str, hint: str, rows: tables.Rows) -> list[Finding]:
    lines = trial.differences_in_order(rows)
    text = f"{story}, the outcome differs from that with a new process for each event: {hint}"
    return [Finding(text, tuple(lines))] if lines else []


def _snapshot(task: Any) -> dict[str, str]:
    """The attributes of an instance and its classes, as strings."""
    own = {
        f"self.{name}": _text(value)
        for name, value in vars(task).items()
        if name not in _OURS and name not in _ENGINES
    }
    for cls in type(task).__mro__:
        if cls.__module__.partition(".")[0] not in ("onceward", "builtins"):
            own |= {
                f"{cls.__name__}.{name}": _text(value)
                for name, value in vars(cls).items()
                if not name.startswith("__") and not callable(value)
            }
    return own


def _text(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  a user's repr may raise anything
        return ""
