"""`onceward dlq redrive --dry-run`: show what would happen to letters in a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import typer

from onceward.cli.dlq.options import shorten
from onceward.cli.exit import FAILED
from onceward.cli.output import print_json, print_table
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


def rehearse(letters: DeadLetters, wanted: Filter, task_path: str, limit: int, as_json: bool) -> int:
    """Show what would happen. Returns the exit code: FAILED if a letter would die again."""
    from onceward._sync import run_blocking
    from onceward.connectors.codec import DecodeError
    from onceward.deadletters.dry_run import PredictedOutcome, Prediction
    from onceward.deadletters.redrive import RATE, check
    from onceward.deadletters.root_causes import RedriveRefusedError

    check(wanted, 0, RATE)
    engine: Any = letters.operations.ports.engine  # type: ignore[attr-defined]
    task = _build_task(task_path, engine)
    _check_consumer(task, task_path, wanted)
    found = letters.find(msgspec.structs.replace(wanted, status="open"), limit=limit)
    found.sort(key=lambda letter: (-1 if letter.sequence is None else letter.sequence, letter.id))
    if not found:
        raise RedriveRefusedError(run_blocking(letters.operations.explain_no_match(wanted)))
    readable: dict[int, Transaction] = {}
    predicted: dict[int, Prediction] = {}
    for letter in found:
        problem = "poison is never redriven" if letter.category == "poison" else ""
        try:
            transaction = _transaction(letters, letter)
        except DecodeError as error:
            problem = problem or str(error)
        if problem:
            predicted[letter.id] = Prediction(
                transaction_id=letter.message_id, outcome=PredictedOutcome.BREACH, detail=problem
            )
        else:
            readable[letter.id] = transaction
    predictions = _predict(task, list(readable.values()), engine)
    predicted |= dict(zip(readable, predictions, strict=True))
    ordered = {letter.id: predicted[letter.id] for letter in found}
    _show(ordered, as_json)
    return 0 if all(each.is_good for each in ordered.values()) else FAILED


def _transaction(letters: DeadLetters, letter: Any) -> Transaction:
    from onceward._sync import run_blocking
    from onceward.deadletters.letter import transaction_of

    return transaction_of(
        letters.body(letter.id),
        message_id=letter.message_id,
        event_at=run_blocking(letters.operations.event_at(letter.id)),
        first_failed_at=letter.first_failed_at.timestamp(),
    )


def _build_task(path: str, engine: Engine) -> Any:
    """The task that a path names: an instance, what a function returns, a class, or a function of an app."""
    from onceward._imports import import_name
    from onceward.app.build import as_task
    from onceward.connectors import AsyncMemoryConnector, MemoryConnector
    from onceward.inbox import Inbox
    from onceward.task.base import AsyncTask, BaseTask

    named = task = as_task(import_name(path))
    if isinstance(named, type) and issubclass(named, BaseTask):
        source: Any = AsyncMemoryConnector() if issubclass(named, AsyncTask) else MemoryConnector()
        task = named({"source": source}, {"inbox": Inbox(engine)})
    elif callable(named) and _takes_nothing(named):
        task = named()
    if not isinstance(task, BaseTask):
        raise ConfigurationError(
            f"--task {path} must name a consumer: a function of an app, as in shop:charge, a class, an instance, or a "
            f"function without parameters that returns one; it is {type(task).__name__}"
        )
    return task


def _check_consumer(task: Any, path: str, wanted: Filter) -> None:
    """Refuse the task of another consumer: what it would do with the letters means nothing."""
    contract = getattr(task, "contract", None)
    if contract is not None and contract.consumer_id != wanted.consumer:
        raise ConfigurationError(
            f"--task {path} is consumer {contract.consumer_id!r}, but the letters belong to {wanted.consumer!r}; "
            "name the task of that consumer"
        )


def _takes_nothing(function: Any) -> bool:
    import inspect

    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return all(each.default is not each.empty or each.kind in optional for each in parameters)


def _predict(task: Any, transactions: list[Transaction], engine: Engine) -> list[Prediction]:
    from onceward.deadletters.dry_run import dry_run
    from onceward.task.base import AsyncTask

    if not isinstance(task, AsyncTask):
        return dry_run(task, transactions, engine)
    import asyncio

    return asyncio.run(_predict_async(task, transactions, engine))


async def _predict_async(task: Any, transactions: list[Transaction], engine: Engine) -> list[Prediction]:
    from sqlalchemy.ext.asyncio import create_async_engine

    from onceward.deadletters.dry_run import dry_run_async

    driver = "sqlite+aiosqlite" if engine.dialect.name == "sqlite" else "postgresql+psycopg"
    async_engine = create_async_engine(engine.url.set(drivername=driver))
    try:
        return await dry_run_async(task, transactions, async_engine)
    finally:
        await async_engine.dispose()


def _show(predicted: dict[int, Prediction], as_json: bool) -> None:
    if as_json:
        print_json([{"id": id_, **msgspec.to_builtins(each)} for id_, each in predicted.items()])
        return
    rows = [
        {
            "id": id_,
            "outcome": WORDS[each.outcome],
            "detail": shorten(each.detail, 120),
            "writes": ", ".join(f"{one.verb} {one.table}: {one.rows}" for one in each.statements),
        }
        for id_, each in predicted.items()
    ]
    columns = {name: name for name in ("id", "outcome", "detail", "writes")}
    print_table(rows, columns, "", usual={"detail": "", "writes": ""})
    for id_, each in predicted.items():
        for diff in each.tables:
            for sign, changed in (("-", diff.removed), ("+", diff.added)):
                for row in changed:
                    values = ", ".join(f"{name}={value!r}" for name, value in row.items())
                    typer.echo(f"{id_:>8}  {sign} {diff.table}: {values}")
    typer.echo("Nothing was sent or changed.")
