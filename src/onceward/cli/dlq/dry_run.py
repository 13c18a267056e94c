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
    from onceward.transaction import Transaction

WORDS = {
    "succeed": "would succeed",
    "duplicate": "is a duplicate: no second effect",
    "superseded": "is superseded: no effect",
    "wait": "would wait",
    "effect": "would run an effect",
    "breach": "would die again: contract",
    "raise": "would die again: raises",
}


def rehearse(
    letters: DeadLetters, wanted: Filter, task_path: str, limit: int, as_json: bool, poison_fixed: bool
) -> int:
    """Show what would happen. Returns the exit code: FAILED if a letter would die again."""
    from onceward._sync import run_blocking
    from onceward.connectors.codec import DecodeError
    from onceward.deadletters.dry_run import PredictedOutcome, Prediction, check_consumer
    from onceward.deadletters.redrive import ONLY_FIXED, RATE, check
    from onceward.deadletters.root_causes import RedriveRefusedError

    check(wanted, 0, RATE, poison_fixed)
    engine: Any = letters.operations.ports.engine  # type: ignore[attr-defined]
    task = build_task(task_path, engine)
    check_consumer(task, f"--task {task_path}", wanted.consumer)
    found = letters.find(msgspec.structs.replace(wanted, status="open"), limit=limit)
    found.sort(key=lambda letter: (-1 if letter.sequence is None else letter.sequence, letter.id))
    if not found:
        raise RedriveRefusedError(run_blocking(letters.operations.explain_no_match(wanted)))
    readable: dict[int, Transaction] = {}
    predicted: dict[int, Prediction] = {}
    for letter in found:
        problem = f"it is poison: {ONLY_FIXED}" if letter.category == "poison" and not poison_fixed else ""
        try:
            transaction = run_blocking(letters.operations.draft(letter.id)).transaction()
        except DecodeError as error:
            problem = problem or str(error)
        if problem:
            predicted[letter.id] = Prediction(
                transaction_id=letter.message_id, outcome=PredictedOutcome.BREACH, detail=problem
            )
        else:
            readable[letter.id] = transaction
    predictions = predict(task, list(readable.values()), engine, poison_fixed)
    predicted |= dict(zip(readable, predictions, strict=True))
    ordered = {letter.id: predicted[letter.id] for letter in found}
    show(ordered, as_json)
    return 0 if all(each.is_good for each in ordered.values()) else FAILED


class Unopened:
    """Stands for a service: a dry run runs no effects, and opens nothing."""

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # Python asks for these
            raise AttributeError(attribute)
        raise ConfigurationError(
            f"the handler uses the service {self.__name} outside an effect, and a dry run opens no services; name a "
            "function that returns the task with a fake: --task MODULE:FUNCTION"
        )


def build_task(path: str, engine: Engine) -> Any:
    """The task that a path names: an instance, what a function returns, a class, or a function of an app."""
    from onceward._imports import import_name
    from onceward.app.build import in_an_app, set_gate, task_class
    from onceward.connectors import AsyncMemoryConnector, MemoryConnector
    from onceward.inbox import Inbox
    from onceward.task.base import AsyncTask, BaseTask

    named = task = import_name(path)
    inbox = Inbox(engine)
    if (found := in_an_app(named)) is not None:
        app, consumer = found
        set_gate(inbox, app)
        named = task_class(consumer)
    if isinstance(named, type) and issubclass(named, BaseTask):
        source: Any = AsyncMemoryConnector() if issubclass(named, AsyncTask) else MemoryConnector()
        taken = getattr(named, "injection", None)
        fakes = {each.name: Unopened(each.name) for each in taken.parameters.values()} if taken else {}
        task = named({"source": source}, {"inbox": inbox, **fakes})
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


def predict(
    task: Any, transactions: list[Transaction], engine: Engine, poison_fixed: bool
) -> list[Prediction]:
    """Predict in the mode of the task."""
    from onceward.deadletters.dry_run import dry_run
    from onceward.task.base import AsyncTask

    if not isinstance(task, AsyncTask):
        return dry_run(task, transactions, engine, poison_fixed=poison_fixed)
    import asyncio

    return asyncio.run(_predict_async(task, transactions, engine, poison_fixed))


async def _predict_async(
    task: Any, transactions: list[Transaction], engine: Engine, poison_fixed: bool
) -> list[Prediction]:
    from sqlalchemy.ext.asyncio import create_async_engine

    from onceward.db.engines import connect_arguments, hide_values
    from onceward.deadletters.dry_run import dry_run_async

    driver = "sqlite+aiosqlite" if engine.dialect.name == "sqlite" else "postgresql+psycopg"
    arguments = connect_arguments(engine.url, name="onceward")
    url = engine.url.set(drivername=driver)
    async_engine = hide_values(create_async_engine(url, connect_args=arguments))
    try:
        return await dry_run_async(task, transactions, async_engine, poison_fixed=poison_fixed)
    finally:
        await async_engine.dispose()


def show(predicted: dict[int, Prediction], as_json: bool) -> None:
    if as_json:
        print_json([{"id": id_, **msgspec.to_builtins(each)} for id_, each in predicted.items()])
        return
    rows = [
        {
            "id": id_,
            "outcome": WORDS[each.outcome],
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
