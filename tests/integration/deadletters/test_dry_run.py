"""A dry run reports what would happen, and leaves no trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from onceward import AsyncConsumerTask, ConsumerTask, Limit, Transaction
from onceward.deadletters.dry_run import PredictedOutcome, Prediction, dry_run, dry_run_async
from onceward.errors import ConfigurationError
from onceward.inbox import Contract, ContractError
from onceward.limits.limit import KeyReader
from onceward.order.rule import OrderRule
from onceward.task.exceptions import ExceptionCategory, TransactionException
from tests.support.deadletters.world import Letters, contract, order

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")

INSERT = "INSERT INTO bills VALUES (:id, :amount)"


@pytest.fixture(autouse=True)
def bills(letters: Letters) -> None:
    letters.database.do(
        "CREATE TABLE bills (id text PRIMARY KEY, amount integer)", "INSERT INTO bills VALUES ('there', 1)"
    )


class Trial:
    def __init__(
        self, letters: Letters, handle: Callable[..., Any], promised: Contract | None = None
    ) -> None:
        self.letters = letters
        self.promised = promised or contract()
        self.inbox = letters.inbox(self.promised)
        base: Any = AsyncConsumerTask if letters.database.asynchronous else ConsumerTask

        async def process_async(task: Any, transaction: Transaction, session: Any) -> Any:
            result = handle(transaction, session)
            return await result if inspect.isawaitable(result) else result

        def process(task: Any, transaction: Transaction, session: Any) -> Any:
            return handle(transaction, session)

        method = process_async if letters.database.asynchronous else process
        kind = type("Billing", (base,), {"process_transaction": method, "contract": self.promised})
        self.task = kind({"source": letters.queue()}, {"inbox": self.inbox})

    def run(self, *transactions: Transaction) -> list[Prediction]:
        engine = self.letters.database.default
        before = snapshot(self.letters)
        if self.letters.database.asynchronous:
            predictions = self.letters.run(dry_run_async(self.task, transactions, engine))
        else:
            predictions = dry_run(self.task, transactions, engine)
        assert snapshot(self.letters) == before, "it left a trace"
        return predictions

    def one(self, transaction: Transaction | None = None) -> Prediction:
        (prediction,) = self.run(transaction or order("o1"))
        return prediction

    def apply(self, transaction: Transaction, handle: Callable[..., Any]) -> None:
        async def handle_async(event: Any, session: Any) -> None:
            result = handle(event, session)
            if inspect.isawaitable(result):
                await result

        used = handle_async if self.letters.database.asynchronous else handle
        self.letters.run(self.inbox.process(self.promised, transaction, used))


def snapshot(letters: Letters) -> dict[str, Any]:
    """All rows, and the names of all tables."""
    if letters.database.is_sqlite:
        names = letters.rows("SELECT name FROM sqlite_master WHERE type = 'table'")
    else:
        names = letters.rows(
            "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = current_schema()"
        )
    return {row["name"]: sorted(map(repr, letters.rows(f'SELECT * FROM "{row["name"]}"'))) for row in names}


def insert(transaction: Transaction, session: Any) -> Any:
    return session.execute(INSERT, {"id": transaction.id, "amount": transaction.payload["amount"]})


@pytest.mark.req("CC-052")
def test_what_would_succeed_shows_the_rows_that_would_change(letters: Letters) -> None:
    prediction = Trial(letters, insert).one()
    assert prediction.outcome is PredictedOutcome.SUCCEED
    (change,) = prediction.statements
    assert (change.table, change.verb, change.statements, change.rows) == ("bills", "insert", 1, 1)
    (diff,) = prediction.tables
    assert (diff.table, diff.added, diff.removed) == ("bills", ({"id": "o1", "amount": 7},), ())


def test_a_changed_row_goes_and_comes(letters: Letters) -> None:
    trial = Trial(letters, lambda _, session: session.execute("UPDATE bills SET amount = amount + 1"))
    (diff,) = trial.one().tables
    assert diff.added == ({"id": "there", "amount": 2},)
    assert diff.removed == ({"id": "there", "amount": 1},)


def test_of_a_large_table_only_the_statements_are_shown(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward.deadletters.row_watch.SMALL", 1)
    prediction = Trial(letters, insert).one()
    assert (prediction.statements[0].rows, prediction.tables) == (1, ())


@pytest.mark.req("CC-052")
def test_duplicates_conflicts_and_what_fails_are_reported(letters: Letters) -> None:
    def handle(transaction: Transaction, session: Any) -> Any:
        if transaction.id == "bug":
            raise KeyError("total")
        if transaction.id == "refused":
            raise TransactionException("no such account", ExceptionCategory.BUSINESS)
        if transaction.id == "clash":
            return session.execute(INSERT, {"id": "there", "amount": 1})
        return insert(transaction, session)

    trial = Trial(letters, handle)
    applied = order("applied")
    trial.apply(applied, lambda *_: None)
    predictions = trial.run(
        applied,
        Transaction(
            id="applied", payload={"amount": 8}, metadata=applied.metadata, created_at=applied.created_at
        ),
        order("bug"),
        order("refused"),
        order("clash"),
        order("strange", event_type="order.unknown"),
        order("newer", payload={"amount": 1, "schema_version": 9}),
        order("fine"),
    )
    reported = [(each.outcome, each.detail) for each in predictions]
    assert reported[0] == (PredictedOutcome.DUPLICATE, "")
    assert reported[1][0] is PredictedOutcome.BREACH
    assert "conflict" in reported[1][1]
    assert reported[2] == (PredictedOutcome.RAISE, "KeyError: 'total'")
    assert "no such account" in reported[3][1]
    assert (reported[4][0], "IntegrityError" in reported[4][1] or "UniqueViolation" in reported[4][1]) == (
        PredictedOutcome.RAISE,
        True,
    )
    assert (reported[5][0], reported[6][0]) == (PredictedOutcome.BREACH, PredictedOutcome.BREACH)
    assert reported[6][1].startswith("schema: ")
    assert reported[7][0] is PredictedOutcome.SUCCEED
    assert [each.is_good for each in predictions] == [True, False, False, False, False, False, False, True]


@pytest.mark.req("CC-052")
def test_an_event_without_a_key_would_die_again(letters: Letters) -> None:
    trial = Trial(letters, insert)
    keyed = order("keyed", payload={"amount": 1, "customer": "ann"})
    done = order("done")
    trial.apply(done, lambda *_: None)
    type(trial.task).order_rule = OrderRule("customer")
    reported = [(each.outcome, each.detail) for each in trial.run(keyed, order("keyless"), done)]
    missing = (
        "envelope: it has no key for order_by: customer is not a text, a whole number or a UUID: it is empty"
    )
    assert reported == [
        (PredictedOutcome.SUCCEED, ""),
        (PredictedOutcome.BREACH, missing),
        (PredictedOutcome.DUPLICATE, ""),
    ]
    type(trial.task).order_rule = None
    type(trial.task).limit_keys = KeyReader(Limit(rate="1/s", by="customer"), "billing")
    one, other = trial.run(keyed, order("keyless"))
    assert one.outcome is PredictedOutcome.SUCCEED
    assert other.outcome is PredictedOutcome.BREACH
    assert (
        "billing is limited by 'customer', but the payload of this message has no such field" in other.detail
    )


@pytest.mark.req("CC-052")
def test_todays_upcasters_are_used(letters: Letters) -> None:
    today = contract(schema_version=2, upcasters={1: lambda old: {"amount": old["amount"] * 100}})
    (diff,) = Trial(letters, insert, today).one().tables
    assert diff.added == ({"id": "o1", "amount": 700},)


@pytest.mark.req("CC-052")
def test_an_effect_is_not_called_but_named_with_its_key(letters: Letters) -> None:
    called: list[str] = []

    def charge(key: str) -> Any:
        called.append(key)
        return {"charge": 1}

    async def charge_async(key: str) -> Any:
        return charge(key)

    def handle(transaction: Transaction, session: Any) -> Any:
        return session.effect("charge-card", charge_async if letters.database.asynchronous else charge)

    trial = Trial(letters, handle, contract(mode="effectful"))
    prediction = trial.one()
    assert prediction.outcome is PredictedOutcome.EFFECT
    assert "'charge-card' with key o1-1-" in prediction.detail
    assert called == []

    # The real run uses the key of the dry run. It fails afterwards, and the next dry run knows the outcome.
    def fail(event: Any, session: Any) -> Any:
        if letters.database.asynchronous:

            async def failing() -> None:
                await session.effect("charge-card", charge_async)
                raise RuntimeError("after the effect")

            return failing()
        session.effect("charge-card", charge)
        raise RuntimeError("after the effect")

    sent = order("o1")
    with pytest.raises(RuntimeError, match="after the effect"):
        trial.apply(sent, fail)
    assert prediction.detail.endswith(called[0])
    assert trial.one(sent).outcome is PredictedOutcome.SUCCEED
    assert len(called) == 1


@pytest.mark.without("asyncio")
@pytest.mark.req("CC-056")
@pytest.mark.parametrize("catches", [False, True])
def test_a_name_that_is_used_twice_would_fail_again(letters: Letters, catches: bool) -> None:
    def handle(_: Any, session: Any) -> None:
        for _ in range(2):
            with suppress(ContractError) if catches else nullcontext():
                session.effect("ship", lambda key: 1)

    trial = Trial(letters, handle, contract(mode="effectful"))
    with pytest.raises(ContractError, match="twice"):
        trial.apply(order("o1"), handle)
    prediction = trial.one()
    assert prediction.outcome is PredictedOutcome.BREACH
    assert "'ship' twice" in prediction.detail


@pytest.mark.without("asyncio")
@pytest.mark.req("CC-057")
def test_a_key_that_todays_code_takes_for_expired_is_in_doubt(letters: Letters) -> None:
    def lose(_: Any, session: Any) -> None:
        session.effect("charge", fail)

    def fail(key: str) -> None:
        raise TimeoutError

    def handle(_: Any, session: Any) -> None:
        with suppress(ContractError):
            session.effect("charge", fail, key_valid_for=3600)

    trial = Trial(letters, handle, contract(mode="effectful"))
    with pytest.raises(TimeoutError):
        trial.apply(order("o1"), lose)
    assert trial.one().outcome is PredictedOutcome.EFFECT
    letters.database.do("UPDATE onceward_effects SET intended_at = intended_at - 3601")
    prediction = trial.one()
    assert prediction.outcome is PredictedOutcome.BREACH
    assert prediction.detail.startswith("in_doubt: ")


@pytest.mark.without("asyncio")
def test_a_handler_that_reaches_around_the_session_is_stopped(letters: Letters, tmp_path: Any) -> None:
    path = tmp_path / "outside"

    class Sneaky(ConsumerTask):
        contract = contract()

        def process_transaction(self, transaction: Transaction, session: Any) -> None:
            path.write_text("an effect")

    letters.inbox(Sneaky.contract)
    task = Sneaky({"source": letters.queue()})
    (prediction,) = dry_run(task, [order("o1")], letters.database.default)
    assert prediction.outcome is PredictedOutcome.RAISE
    assert "did its own I/O" in prediction.detail
    assert not path.exists()
    assert task.settings.io_guard == "off"


def test_one_that_is_out_of_turn_would_wait(letters: Letters) -> None:
    trial = Trial(letters, insert, contract(sequencing="strict"))
    first, second = trial.run(
        order("o1", aggregate_id="a", sequence=1), order("o2", aggregate_id="a", sequence=2)
    )
    assert first.outcome is PredictedOutcome.SUCCEED
    assert (second.outcome, second.detail) == (
        PredictedOutcome.WAIT,
        "number 1 of its aggregate has not arrived yet",
    )


def test_what_cannot_be_tried_is_said_early(letters: Letters) -> None:
    trial = Trial(letters, insert)
    letters.run(trial.inbox.unregister("billing"))
    with pytest.raises(ConfigurationError, match="not registered"):
        trial.one()
    trial.task.contract = None
    with pytest.raises(ConfigurationError, match="has no contract"):
        trial.one()
