"""`onceward dlq redrive --dry-run`: show what would happen to letters in a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from onceward.cli.dlq.options import shorten
from onceward.cli.exit import FAILED
from onceward.cli.output import echo, print_json, print_table
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from onceward.deadletters import DeadLetters, Filter
    from onceward.deadletters.dry_run import Prediction


def show_rehearsal(
    letters: DeadLetters, wanted: Filter, task_path: str, limit: int, as_json: bool, poison_fixed: bool
) -> int:
    """Show what would happen. Returns the exit code: FAILED if a letter would die again."""
    from onceward._sync import run_blocking
    from onceward.app.rehearsal import rehearse
    from onceward.deadletters.dry_run import check_consumer
    from onceward.deadletters.redrive import RATE, check
    from onceward.deadletters.root_causes import RedriveRefusedError

    check(wanted, 0, RATE, poison_fixed)
    engine: Any = letters.operations.ports.engine  # type: ignore[attr-defined]
    task = build_task(task_path, engine)
    check_consumer(task, f"--task {task_path}", wanted.consumer)
    found = letters.find(msgspec.structs.replace(wanted, status="open"), limit=limit)
    if not found:
        raise RedriveRefusedError(run_blocking(letters.operations.explain_no_match(wanted)))
    ordered = rehearse(letters, found, task, poison_fixed)
    show(ordered, as_json)
    return 0 if all(each.is_good for each in ordered.values()) else FAILED


def build_task(path: str, engine: Engine) -> Any:
    """The task that a path names: an instance, what a function returns, a class, or a function of an app."""
    from onceward._imports import import_name
    from onceward.app.build import in_an_app, task_class
    from onceward.app.rehearsal import task_for_dry_runs
    from onceward.task.base import BaseTask

    named = task = import_name(path)
    app = None
    if (found := in_an_app(named)) is not None:
        app, consumer = found
        named = task_class(consumer)
    if isinstance(named, type) and issubclass(named, BaseTask):
        task = task_for_dry_runs(named, engine, app)
    elif callable(named) and _takes_nothing(named):
        task = named()
    if not isinstance(task, BaseTask):
        raise ConfigurationError(
            f"--task {path} must name a consumer: a function of an app, as in shop:charge, a class, an instance, or a "
            f"function without parameters that returns one; it is {type(task).__name__}"
        )
    return task


def _takes_nothing(function: Any) -> bool:
    import inspect

    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return all(each.default is not each.empty or each.kind in optional for each in parameters)


def show(predicted: dict[int, Prediction], as_json: bool) -> None:
    from onceward.app.rehearsal import PREDICTED

    if as_json:
        print_json([{"id": id_, **msgspec.to_builtins(each)} for id_, each in predicted.items()])
        return
    rows = [
        {
            "id": id_,
            "outcome": PREDICTED[each.outcome],
            "writes": ", ".join(f"{one.verb} {one.table}: {one.rows}" for one in each.statements),
        }
        for id_, each in predicted.items()
    ]
    columns = {name: name for name in ("id", "outcome", "writes")}
    print_table(rows, columns, "", usual={"writes": ""})
    for id_, each in predicted.items():
        if each.detail:
            echo(f"{id_:>8}  {shorten(each.detail, 300)}")
        for diff in each.tables:
            for sign, changed in (("-", diff.removed), ("+", diff.added)):
                for row in changed:
                    values = ", ".join(f"{name}={value!r}" for name, value in row.items())
                    echo(f"{id_:>8}  {sign} {diff.table}: {values}")
    echo("Nothing was sent or changed.")
