"""One instance for everything, and once more for everything on another database: it must not remember."""

from __future__ import annotations

from typing import Any

from onceward.verify import tables
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Trial, Tried, deliver_all, unsettled

_OURS = ("probe_of_verification", "process_transaction", "handle_transaction_success")
_ENGINES = ("_engine_state", "connectors", "services")


def state(trial: Trial) -> Tried:
    def act(stage: Stage) -> tuple[tables.Rows, list[Delivery], tables.Rows, list[Delivery], list[str]]:
        task = stage.instance()
        before = _remembered(task)
        deliveries = deliver_all(stage, trial.plan.events, task=task)
        rows = stage.rows(trial.tables)
        changed = [name for name, value in _remembered(task).items() if before.get(name) != value]

        def once_more(other: Stage) -> list[Delivery]:
            other.adopt(task)
            return deliver_all(other, trial.plan.events, task=task)

        again, rows_again = trial.on_another(stage, once_more)
        return rows, deliveries, rows_again, again, changed

    rows, deliveries, rows_again, again, changed = trial.perform(act).value
    named = f": {', '.join(changed)}" if changed else ""
    hint = f"what the consumer keeps on self, on its class or in a module changes the outcome{named}"
    story = "with one instance for all events"
    findings = unsettled(story, deliveries) + _told(trial, story, hint, rows)
    story = "with an instance that has done the same events before, on another database"
    findings += unsettled(story, again) + _told(trial, story, hint, rows_again)
    return Tried(findings, "one instance, all events, twice")


def _told(trial: Trial, story: str, hint: str, rows: tables.Rows) -> list[Finding]:
    told = trial.differences(rows)
    return (
        [Finding(f"{story} the outcome is another than with a new process for each: {hint}", tuple(told))]
        if told
        else []
    )


def _remembered(task: Any) -> dict[str, str]:
    """What an instance and its classes have, as text."""
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
    except Exception:  # noqa: BLE001  a stranger's repr
        return ""
