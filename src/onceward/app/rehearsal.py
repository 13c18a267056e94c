"""A consumer of an app as a task for dry runs: its services are not opened, and its source is empty."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from onceward.app.services import Injection
    from onceward.deadletters import DeadLetter, DeadLetters
    from onceward.deadletters.dry_run import Prediction
    from onceward.deadletters.edits import Draft
    from onceward.transaction import Transaction

PREDICTED = {
    "succeed": "would succeed",
    "duplicate": "is a duplicate: no second effect",
    "superseded": "is superseded: no effect",
    "wait": "would wait",
    "effect": "would run an effect",
    "breach": "would die again",
    "raise": "would die again: raises",
}
"""What a prediction says about a letter."""


LONGEST = 60.0
"""Seconds that a dry run in a process of its own may take."""
QUIET = 2.0
"""Seconds that it waits for a moment to fork in which no other thread uses the database. A web app may use it all the
time."""


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


def task_for_dry_runs(kind: type[Any], engine: Engine, app: Any = None) -> Any:
    """Build a task of this class on the app's inbox."""
    from onceward.app.build import set_gate
    from onceward.connectors import AsyncMemoryConnector, MemoryConnector
    from onceward.inbox import Inbox
    from onceward.task.base import AsyncTask

    inbox = Inbox(engine)
    if app is not None:
        set_gate(inbox, app)
    source: Any = AsyncMemoryConnector() if issubclass(kind, AsyncTask) else MemoryConnector()
    taken = getattr(kind, "injection", None)
    fakes = _unopened(taken) if taken else {}
    return kind({"source": source}, {"inbox": inbox, **fakes})


def _unopened(taken: Injection) -> dict[str, Any]:
    """What is made for each message from its session alone is made; the rest is not opened."""
    from onceward.app.injection.scope import PerMessage

    return {
        each.name: PerMessage(each, taken.services)
        if each.per == "message" and not each.outside
        else Unopened(each.name)
        for each in taken.services.in_order(taken.parameters.values())
    }


def rehearse(
    letters: DeadLetters, found: Iterable[DeadLetter], task: Any, poison_fixed: bool
) -> dict[int, Prediction]:
    """Predict what a redrive would do with these, by the number of the letter, in the order of a redrive."""
    from onceward._sync import run_blocking
    from onceward.connectors.codec import DecodeError
    from onceward.deadletters.dry_run import PredictedOutcome, Prediction
    from onceward.deadletters.redrive import ONLY_FIXED

    ordered = sorted(found, key=lambda each: (-1 if each.sequence is None else each.sequence, each.id))
    readable: dict[int, Transaction] = {}
    predicted: dict[int, Prediction] = {}
    for letter in ordered:
        problem = f"it is poison: {ONLY_FIXED}" if is_poison(letter) and not poison_fixed else ""
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
    engine: Any = letters.operations.ports.engine  # type: ignore[attr-defined]
    poison = {each.id: readable.pop(each.id) for each in ordered if is_poison(each) and each.id in readable}
    predictions = predict(task, list(readable.values()), engine, poison_fixed)
    predicted |= dict(zip(readable, predictions, strict=True))
    predicted |= {number: predict_apart(task, each, engine) for number, each in poison.items()}
    return {letter.id: predicted[letter.id] for letter in ordered}


def is_poison(letter: DeadLetter) -> bool:
    return letter.category == "poison"


def predict_edit(task: Any, draft: Draft, body: bytes, engine: Engine) -> Prediction:
    """Predict what this letter would do with another body. Nobody has tried that one: it may kill the process."""
    return predict_apart(task, draft.transaction(body), engine)


def predict_apart(task: Any, transaction: Transaction, engine: Engine) -> Prediction:
    """Predict in a process of its own, as if what made poison of it were fixed. It may kill that one."""
    from onceward._process.child import ChildDied, call_in_child
    from onceward.db.backends.quiet_files import await_quiet_file
    from onceward.deadletters.dry_run import PredictedOutcome, Prediction

    await_quiet_file(engine, QUIET)  # a fork would share its connections

    def run() -> Prediction:
        engine.dispose(close=False)
        return predict(task, [transaction], engine, poison_fixed=True)[0]

    try:
        predicted: Prediction = call_in_child(run, LONGEST)
    except ChildDied as error:
        return Prediction(
            transaction_id=transaction.id,
            outcome=PredictedOutcome.RAISE,
            detail=f"the process that tried it {error}",
        )
    return predicted


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
    url = engine.url.set(drivername=driver)
    arguments = connect_arguments(url, name="onceward", asynchronous=True)
    async_engine = hide_values(create_async_engine(url, connect_args=arguments))
    try:
        return await dry_run_async(task, transactions, async_engine, poison_fixed=poison_fixed)
    finally:
        await async_engine.dispose()
