"""Dead letters under the engine: from a source to the store, and from there back to the consumer."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onceward import Transaction
from onceward.connectors import MemoryConnector, SqliteConnector
from onceward.connectors.codec import encode_with
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.deadletters import Category, Filter, Status
from onceward.deadletters.burial import burial_of
from onceward.deadletters.source import AsyncWithDeadLetters, WithDeadLetters
from onceward.errors import ConfigurationError
from onceward.queue.messages import QueueMessage
from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.testing.clock import FakeClock
from onceward.transaction import Settlement, Verdict
from tests.support.deadletters.world import BILLING, START, Letters, burial, contract, order
from tests.support.world import retry

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")


def fail(*_: Any) -> None:
    raise RuntimeError("no connection")


def refuse(*_: Any) -> None:
    raise TransactionException("no such account", category=ExceptionCategory.BUSINESS)


def bill(transaction: Transaction, session: Any) -> Any:
    """In asyncio, its return value is awaited."""
    return session.execute(
        "INSERT INTO bills VALUES (:id, :amount)", {"id": transaction.id, **transaction.payload}
    )


def billed(letters: Letters) -> list[Any]:
    return [(row["id"], row["amount"]) for row in letters.rows("SELECT id, amount FROM bills ORDER BY id")]


@pytest.fixture
def bills(letters: Letters) -> None:
    letters.database.do("CREATE TABLE bills (id text, amount integer)")


# ── from the source to the store ────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-050")
def test_what_exhausts_its_deliveries_is_moved_with_its_whole_history(letters: Letters) -> None:
    queue = letters.queue(max_deliveries=5, redelivery_delay=1.0)
    source = letters.around(queue)
    sent = order("o1", aggregate_id="a", sequence=3)
    letters.dispatch(source, sent)
    for _ in range(5):
        letters.consume(source, fail)
        letters.advance(60)
    letter = letters.one()
    assert (letter.attempts, letter.deaths, letter.reason) == (5, 1, "max_deliveries")
    assert [each.attempt for each in letter.history] == [1, 2, 3, 4, 5]
    assert all("no connection" in each.error for each in letter.history)
    assert (letter.message_id, letter.event_type) == ("o1", "order.paid")
    assert (letter.aggregate_id, letter.sequence, letter.category) == ("a", 3, Category.INFRASTRUCTURE)
    assert letter.first_failed_at.isoformat() == letter.history[0].at
    assert letters.body(letter.id) == encode_with({}, sent)
    assert (
        letters.run(source.counts_async() if letters.database.asynchronous else source.counts())["dead"] == 0
    )


@pytest.mark.req("CC-050")
def test_categories_follow_from_what_happened(letters: Letters) -> None:
    queue = letters.queue(lease=10.0)
    source = letters.around(queue)
    wire = getattr(queue, "_wire", queue)
    letters.dispatch(source, order("business"))
    letters.consume(source, refuse)
    # Before there is an inbox, which counts starts itself.
    letters.dispatch(source, order("poison"))
    for _ in range(5):
        assert wire.fetch_transactions(1)
        letters.advance(11)
    letters.consume(source, refuse)
    inbox = letters.inbox(contract())
    letters.dispatch(source, order("contract", event_type="order.unknown"))
    letters.consume(source, refuse, inbox=inbox, promised=contract())
    wire._store.append([b"\xc1 nothing that we sent"], letters.clock())
    letters.consume(source, refuse)
    found = {letter.message_id: letter for letter in letters.find()}
    assert found["business"].category is Category.BUSINESS
    assert found["contract"].category is Category.CONTRACT
    poison = found["poison"]
    assert (poison.category, poison.attempts, len(poison.history)) == (Category.POISON, 5, 5)
    (unreadable,) = (letter for letter in found.values() if letter.reason == "undecodable")
    assert unreadable.category is Category.CONTRACT
    assert letters.body(unreadable.id) == b"\xc1 nothing that we sent"


def test_one_delivery_lost_in_a_restart_does_not_make_it_poison(letters: Letters) -> None:
    queue = letters.queue(lease=10.0, max_deliveries=3)
    source = letters.around(queue)
    letters.dispatch(source, order("o1"))
    for _ in range(2):
        letters.consume(source, fail)
        letters.advance(60)
    assert getattr(queue, "_wire", queue).fetch_transactions(1)
    letters.advance(60)
    letters.consume(source, fail)
    letter = letters.one()
    assert (letter.category, letter.attempts, len(letter.history)) == (Category.INFRASTRUCTURE, 3, 3)


@pytest.mark.req("CC-050")
def test_a_store_that_is_away_costs_nothing_but_time(
    letters: Letters, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = letters.around(letters.queue(on_failure="dead_letter"))
    letters.dispatch(source, order("o1"), order("o2"))
    core = letters.made.operations

    async def away(*_: Any) -> None:
        raise ConnectionError("the store is away")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(core, "take_over", away)
        patched.setattr(core, "deliver", away)
        assert letters.consume(source, fail).failed == 2
    assert "they stay in their source" in caplog.text
    assert letters.count() == 0
    letters.consume(source, fail)
    assert letters.count() == 2


def test_a_late_mover_does_not_forget_what_it_has_not_moved(tmp_path: Path) -> None:
    """Two workers move the same letter; before the slower one forgets it, another letter has taken its place."""
    clock = FakeClock(START)
    with SqliteConnector(tmp_path / "queue.db", on_failure="dead_letter", clock=clock) as queue:

        def dies(id_: str) -> list[Any]:
            clock.advance(1)
            queue.dispatch_transactions([order(id_)])
            queue.settle_transactions([Settlement(*queue.fetch_transactions(1), Verdict.FAILED)])
            return queue.dead_letters(10)

        seen_by_both = [each.key for each in dies("o1")]
        queue.forget_dead(seen_by_both)
        ((number, _),) = [each.key for each in dies("o2")]
        assert number == seen_by_both[0][0], "SQLite reuses the number for the next one"
        queue.forget_dead(seen_by_both)
        assert [each.transaction_id for each in queue.dead_letters(10)] == ["o2"]


@pytest.mark.req("CC-050", "CC-052")
def test_dead_letters_of_redis_move_and_come_back(letters: Letters, redis_url: str) -> None:
    kind: Any = AsyncRedisStreamsConnector if letters.database.asynchronous else RedisStreamsConnector
    queue = kind(redis_url, f"orders-{uuid4().hex}", "billing", on_failure="dead_letter")
    source = letters.around(queue)
    sent = order("o1", aggregate_id="a")
    letters.dispatch(source, sent)
    letters.consume(source, fail)
    letter = letters.one()
    assert (letter.message_id, letter.aggregate_id, letter.attempts) == ("o1", "a", 1)
    assert letters.body(letter.id) == encode_with({}, sent)
    assert (
        letters.run(source.counts_async() if letters.database.asynchronous else source.counts())["dead"] == 0
    )
    letters.send_again()
    assert letters.consume(source, lambda _: None).succeeded == 1
    assert letters.one().status is Status.RESOLVED
    letters.run(source.close_async() if letters.database.asynchronous else source.close())


# ── and back ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-052")
@pytest.mark.usefixtures("bills")
def test_a_redriven_event_runs_once_and_one_that_was_applied_is_a_duplicate(letters: Letters) -> None:
    inbox = letters.inbox(contract())
    source = letters.around(letters.queue())
    applied, unapplied = order("applied"), order("unapplied")
    letters.bury(
        *(burial_of(each, consumer="billing", error=RuntimeError("x")) for each in (applied, unapplied))
    )
    letters.send_again(Filter(consumer="billing", event_type="order.paid"))
    beside = letters.queue()
    letters.dispatch(beside, applied)
    assert letters.consume(beside, bill, inbox=inbox, promised=contract()).succeeded == 1
    letters.advance(60)
    report = letters.consume(source, bill, inbox=inbox, promised=contract())
    assert (report.succeeded, report.duplicates) == (2, 1)
    assert billed(letters) == [("applied", 7), ("unapplied", 7)]
    assert {letter.status for letter in letters.find()} == {Status.RESOLVED}
    assert letters.rcas()[0]["closed_at"] is not None


def to_2(payload: dict[str, Any]) -> dict[str, Any]:
    return {"cents": payload["amount"] * 100}


def to_3(payload: dict[str, Any]) -> dict[str, Any]:
    return {"total": payload["cents"]}


def to_4(payload: dict[str, Any]) -> dict[str, Any]:
    return {"amount": payload["total"]}


@pytest.mark.req("CC-052")
@pytest.mark.usefixtures("bills")
def test_a_letter_of_three_versions_ago_goes_through_todays_upcasters(letters: Letters) -> None:
    source = letters.around(letters.queue())
    old = contract()
    letters.dispatch(source, order("o1"))
    letters.consume(source, refuse, inbox=letters.inbox(old), promised=old)
    assert letters.one().category is Category.BUSINESS
    letters.send_again()
    today = contract(schema_version=4, upcasters={1: to_2, 2: to_3, 3: to_4})
    letters.consume(source, bill, inbox=letters.inbox(today), promised=today)
    assert billed(letters) == [("o1", 700)]
    assert letters.one().status is Status.RESOLVED


@pytest.mark.req("CC-052")
@pytest.mark.usefixtures("bills")
@pytest.mark.parametrize("enveloped", [False, True])
def test_a_message_of_the_honest_queue_is_redriven_as_the_event_it_was(
    letters: Letters, enveloped: bool
) -> None:
    """One that was applied as a message is a duplicate as a transaction."""
    inbox = letters.inbox(contract())
    messages = []
    for number, name in enumerate(("applied", "unapplied")):
        raw = f'{{"tracking_id": "{name}",  "event_type": "order.paid", "payload": {{"amount": 9}}}}'
        if not enveloped:
            raw = f'{{"tracking_id": "{name}", "event_type": "order.paid", "amount": 9}}'
        entry = f"{1_600_000_000_000 + number}-0"
        messages.append(QueueMessage("orders", "billing", entry, json.loads(raw), 3, raw.encode()))

    def record(event: Any, session: Any) -> Any:
        values = {"id": event.tracking_id, "amount": event.payload["amount"]}
        return session.execute("INSERT INTO bills VALUES (:id, :amount)", values)

    async def record_async(event: Any, session: Any) -> None:
        await record(event, session)

    handler = record_async if letters.database.asynchronous else record
    letters.bury(*(burial_of(each, consumer="billing", error=TimeoutError("slow")) for each in messages))
    first, _ = letters.find()
    assert (first.message_id, first.attempts, first.origin) == ("applied", 3, "redis stream orders")
    assert letters.body(first.id) == messages[0].raw
    letters.send_again()
    letters.run(inbox.process(contract(), messages[0], handler))
    letters.advance(60)
    seen: list[Transaction] = []

    def bill_it(transaction: Transaction, session: Any) -> Any:
        seen.append(transaction)
        values = {"id": transaction.id, "amount": transaction.payload["amount"]}
        return session.execute("INSERT INTO bills VALUES (:id, :amount)", values)

    report = letters.consume(letters.around(None), bill_it, inbox=inbox, promised=contract())
    assert (report.succeeded, report.duplicates) == (2, 1)
    assert billed(letters) == [("applied", 9), ("unapplied", 9)]
    assert seen[0].created_at == datetime.fromtimestamp(1_600_000_000.001, UTC)
    assert {letter.status for letter in letters.find()} == {Status.RESOLVED}


def test_a_letter_that_nobody_can_read_dies_again(letters: Letters) -> None:
    letters.bury(burial(body=b"\xc1 junk"))
    letters.send_again()
    letters.consume(letters.around(letters.queue()), fail)
    letter = letters.one()
    assert (letter.status, letter.category, letter.deaths) == (Status.OPEN, Category.CONTRACT, 2)
    assert letters.body(letter.id) == b"\xc1 junk"


@pytest.mark.req("CC-052")
def test_a_redriven_letter_that_fails_is_dead_again_and_its_source_goes_on(letters: Letters) -> None:
    source = letters.around(letters.queue())
    letters.bury(burial_of(order("o1"), consumer="billing", error="first"))
    letters.dispatch(source, order("o2"))
    letters.send_again()
    done: list[str] = []

    def handle(transaction: Transaction) -> None:
        if transaction.id == "o1":
            refuse()
        done.append(transaction.id)

    report = letters.consume(source, handle)
    assert (report.failed, report.succeeded, done) == (1, 1, ["o2"])
    letter = letters.one()
    assert (letter.status, letter.deaths, letter.category) == (Status.OPEN, 2, Category.BUSINESS)
    assert "no such account" in letter.history[-1].error


def test_an_outcome_that_could_not_be_reported_is_reported_again(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = letters.around(letters.queue())
    letters.bury(burial_of(order("o1"), consumer="billing", error="first"))
    letters.dispatch(source, order("o2"))
    letters.send_again()
    core = letters.made.operations
    real, failures = core.settle, iter([ConnectionError("away")])

    async def settle(*args: Any) -> Any:
        for error in failures:
            raise error
        return await real(*args)

    monkeypatch.setattr(core, "settle", settle)
    report = letters.consume(source, lambda _: None, fetch=retry(3))
    assert report.succeeded == 2
    assert letters.one().status is Status.RESOLVED


def test_when_only_the_source_could_not_be_reported_the_letter_is_not_settled_twice(
    letters: Letters, caplog: pytest.LogCaptureFixture
) -> None:
    source = letters.around(letters.queue())
    letters.bury(burial_of(order("o1"), consumer="billing", error="first"))
    letters.send_again()
    ending = "_async" if letters.database.asynchronous else ""
    (redriven,) = letters.run(getattr(source, f"fetch_transactions{ending}")(1))
    stranger = Settlement(order("o2"), Verdict.DONE)
    for _ in range(2):
        with pytest.raises(ValueError, match="was not fetched"):
            letters.run(
                getattr(source, f"settle_transactions{ending}")(
                    [Settlement(redriven, Verdict.DONE), stranger]
                )
            )
        letters.run(getattr(source, f"extend_transactions{ending}")([redriven]))
    assert letters.one().status is Status.RESOLVED
    assert "lease expired" not in caplog.text


def test_the_wrapper_says_early_what_cannot_work(letters: Letters) -> None:
    with pytest.raises(ConfigurationError, match="consumer_id"):
        letters.around(letters.queue(), consumer="")
    with pytest.raises(ConfigurationError, match="dead_letters"):
        letters.around(object())
    wrong: Any = WithDeadLetters if letters.database.asynchronous else AsyncWithDeadLetters
    with pytest.raises(ConfigurationError, match="DeadLetters"):
        wrong(MemoryConnector(), letters.made, consumer="billing")
    assert BILLING.is_narrow
