"""`verify` delivers events in groups, as they will run, with faults and kills inside them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import Engine, text

from onceward import ConsumerTask, Onceward, Transaction
from onceward.db.backends.sqlite import Sqlite
from onceward.inbox.commits.group import CommitGroup
from onceward.inbox.evidence.proof import lacking
from onceward.task.groups.together import LONGEST
from onceward.testing.inbox.samples import contract
from onceward.verify import examine_consumer
from onceward.verify.report import ScenarioStatus

EVENTS = [
    {"id": f"order-{number}", "event_type": "order.paid", "payload": {"amount": number}}
    for number in range(3)
]


class Ledger(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        session.execute("UPDATE totals SET amount = amount + :amount", transaction.payload)
        session.execute("INSERT INTO entries VALUES (:id)", {"id": transaction.id})


class OneByOne(Ledger):
    commit = "each"


def setup(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE totals (amount INTEGER)"))
        connection.execute(text("INSERT INTO totals VALUES (0)"))
        connection.execute(text("CREATE TABLE entries (id TEXT)"))


def examine(consumer: Any = Ledger, events: Any = EVENTS) -> Any:
    return examine_consumer(consumer, events=events, setup=setup, only=["groups"])


@pytest.mark.req("GC-10")
def test_a_right_consumer_passes_and_its_groups_were_killed() -> None:
    report = examine()
    assert report["groups"].result is ScenarioStatus.PASSED, str(report)
    assert report["groups"].note.startswith("8 processes killed")


class Exits(Ledger):
    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        try:
            super().process_transaction(transaction, session)
        except Exception:
            raise SystemExit(0) from None


@pytest.mark.req("GC-10")
def test_a_handler_that_exits_is_found() -> None:
    result = examine(Exits)["groups"]
    assert result.result is ScenarioStatus.FAILED
    assert "a handler ended its process" in str(result)


@pytest.mark.req("GC-10")
def test_it_does_not_apply_to_events_that_are_committed_one_by_one() -> None:
    assert not examine(OneByOne)["groups"].applies


@pytest.mark.req("GC-10")
def test_evidence_of_one_way_to_commit_does_not_prove_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = examine(OneByOne).evidence()
    monkeypatch.setattr(OneByOne, "commit", "group")
    problem = lacking(OneByOne.contract, OneByOne, [evidence], "sqlite")
    assert problem is not None
    assert "committed one by one when it was verified" in problem
    assert problem.endswith("in groups here")


@pytest.mark.req("GC-10")
@pytest.mark.parametrize("bug", ["not undone", "done before the commit"])
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "not undone":
        monkeypatch.setattr(Sqlite, "undo_part", lambda *_: None)
    else:
        commit = CommitGroup._commit

        async def roll_back_and_report(group: CommitGroup) -> bool:
            if len(group._kept) > 1:
                group._problem = ValueError("planted")
            await commit(group)
            return True

        monkeypatch.setattr(CommitGroup, "_commit", roll_back_and_report)
    assert examine()["groups"].result is ScenarioStatus.FAILED


class UsesWhatItsNeighborLeft(ConsumerTask):
    """The table is dropped with the commit, which its neighbors share. So slow that a worker would close the group."""

    contract = contract()
    commit = "group"

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        time.sleep(LONGEST)
        session.execute("CREATE TEMP TABLE IF NOT EXISTS new (id TEXT) ON COMMIT DROP")
        session.execute("INSERT INTO new VALUES (:id)", {"id": transaction.id})
        session.execute("INSERT INTO entries SELECT id FROM new")


@pytest.mark.usual("1")
@pytest.mark.req("CC-161")
@pytest.mark.parametrize("samples", [1, 3])
def test_events_are_in_one_group_however_slow_they_are_and_however_few(
    samples: int, postgres_url: str
) -> None:
    report = examine_consumer(
        UsesWhatItsNeighborLeft, EVENTS[:samples], setup=setup, database=postgres_url, only=["groups"]
    )
    assert report["groups"].result is ScenarioStatus.FAILED, str(report)
    assert "entries: " in str(report["groups"])
    assert "too many: {id: 'order-0'}" in str(report["groups"])


books = Onceward("books", database="sqlite:///books.db")


@books.consumer("memory://all", contract=contract())
def enter_all(entries: list[dict[str, Any]], session: Any) -> None:
    session.execute("INSERT INTO entries VALUES (:amount)", entries)


@books.consumer("memory://some", contract=contract(consumer_id="some"))
def enter_some(entries: list[dict[str, Any]], session: Any) -> None:
    session.execute("INSERT INTO entries VALUES (:amount)", entries[:10])


@books.consumer("memory://half", contract=contract(consumer_id="half"))
def enter_half(entries: list[dict[str, Any]], session: Any) -> None:
    session.execute("INSERT INTO entries VALUES (:amount)", entries[:90])


@pytest.mark.req("CC-145")
@pytest.mark.parametrize(
    ("consumer", "found"),
    [(enter_all, False), (enter_half, True), pytest.param(enter_some, True, marks=pytest.mark.long)],
)
def test_a_batch_handler_that_stops_before_the_end_of_a_large_batch_is_found(
    consumer: Any, found: bool
) -> None:
    report = examine(consumer)
    assert report["groups"].result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED), str(report)
    assert ("events like the samples in one batch" in str(report)) is found


@books.consumer("memory://first", contract=contract(consumer_id="first"))
def enter_first(entries: list[dict[str, Any]], session: Any) -> None:
    session.execute("INSERT INTO entries VALUES (:amount)", entries[:1])


@pytest.mark.req("CC-145")
@pytest.mark.parametrize(("consumer", "found"), [(enter_all, False), (enter_first, True)])
def test_one_sample_is_enough_for_a_batch(consumer: Any, found: bool) -> None:
    report = examine(consumer, events=EVENTS[:1])
    assert report["groups"].result is (ScenarioStatus.FAILED if found else ScenarioStatus.PASSED), str(report)
