"""No event ends with its effects and an open dead letter, whichever comes first."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from onceward.connectors.lease_rules import MOST_LOST, BurialReason, DeadMessage, Failure
from onceward.db.operations import key_of
from onceward.deadletters import Category, Filter, Status
from onceward.deadletters.burial import burial_of, burial_of_dead
from onceward.inbox import Busy, Event
from onceward.transaction import Transaction
from tests.support.deadletters.world import BILLING, Letters, contract, order

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")
pytestmark = [pytest.mark.req("CC-059"), pytest.mark.usefixtures("bills")]


@pytest.fixture
def bills(letters: Letters) -> None:
    letters.database.do("CREATE TABLE bills (id text, amount integer)")


def ask(letters: Letters, connector: Any, name: str, *args: Any) -> Any:
    suffix = "_async" if letters.database.asynchronous else ""
    return letters.run(getattr(connector, name + suffix)(*args))


def bill(transaction: Transaction, session: Any) -> Any:
    values = {"id": transaction.id, "amount": transaction.payload["amount"]}
    return session.execute("INSERT INTO bills VALUES (:id, :amount)", values)


def do(letters: Letters, *transactions: Transaction) -> Any:
    """Process these, from a source of their own."""
    beside = letters.queue()
    letters.dispatch(beside, *transactions)
    return letters.consume(beside, bill, inbox=letters.inbox(contract()), promised=contract())


def failed(transaction: Transaction) -> Any:
    return burial_of(transaction, consumer="billing", error=TimeoutError("slow"))


def test_what_is_done_is_not_buried(letters: Letters) -> None:
    done, other = order("done"), order("other")
    do(letters, done)
    assert letters.bury(failed(done), failed(other)) == 1
    assert letters.one().message_id == "other"


def test_the_id_that_counts_is_the_events_and_not_the_transactions(letters: Letters) -> None:
    do(letters, order("copy 1", tracking_id="e1"))
    assert letters.bury(failed(order("copy 2", tracking_id="e1"))) == 0


def test_the_same_id_with_another_payload_is_not_done_and_is_buried(letters: Letters) -> None:
    do(letters, order("e1"))
    assert letters.bury(failed(order("e1", {"amount": 8}))) == 1


@pytest.mark.req("CC-120")
def test_the_same_id_with_another_event_type_is_not_done_and_is_buried(letters: Letters) -> None:
    do(letters, order("e1"))
    other = msgspec.structs.replace(order("e1"), metadata={"event_type": "order.cancelled"})
    assert letters.bury(failed(other)) == 1


@pytest.mark.req("CC-120")
def test_records_and_letters_of_older_versions_are_of_the_same_event(letters: Letters) -> None:
    """They have the digest of the payload alone."""
    old = Event.of(order("e1")).digest.payload.hex()
    before = f"decode('{old}', 'hex')" if letters.database.name == "postgresql" else f"X'{old}'"
    letters.bury(failed(order("e1")))
    letters.database.do(f"UPDATE onceward_dead_letters SET payload_sha256 = {before}")
    do(letters, order("e1"))
    assert letters.one().status is Status.RESOLVED
    letters.database.do(f"UPDATE onceward_dedup SET payload_sha256 = {before}")
    assert letters.bury(failed(order("e1"))) == 0
    assert do(letters, order("e1")).succeeded == 1
    assert letters.database.scalar("SELECT count(*) FROM bills") == 1


def test_a_source_that_gave_up_a_done_message_leaves_no_letter(letters: Letters) -> None:
    """Its process was killed between the commit and the acknowledgment, as often as the source delivers."""
    queue = letters.queue(max_deliveries=1, lease=10.0)
    source = letters.around(queue)
    letters.dispatch(source, order("e1"), order("e2"))
    ask(letters, queue, "fetch_transactions", 1)
    ask(letters, queue, "fetch_transactions", 1)
    do(letters, order("e1"))
    letters.clock.advance(11)
    assert not ask(letters, source, "fetch_transactions", 10)
    assert [letter.message_id for letter in letters.find()] == ["e2"]
    assert ask(letters, queue, "dead_letters", 10) == [], "the source forgets both"


def test_an_event_that_is_done_after_its_burial_resolves_its_letter_in_the_same_commit(
    letters: Letters,
) -> None:
    letters.bury(failed(order("e1")), failed(order("e2")))
    do(letters, order("e1"))
    assert {each.message_id: each.status for each in letters.find()} == {
        "e1": Status.RESOLVED,
        "e2": Status.OPEN,
    }


def test_a_copy_with_another_payload_resolves_nothing(letters: Letters) -> None:
    letters.bury(failed(order("e1", {"amount": 8})))
    do(letters, order("e1"))
    assert letters.one().status is Status.OPEN


def test_a_redriven_letter_that_was_done_meanwhile_does_not_die_again(letters: Letters) -> None:
    letters.bury(failed(order("e1")))
    letters.send_again()
    letters.advance(60)
    [redelivered] = letters.deliver()
    do(letters, order("e1"))
    assert letters.settle(redelivered, "failed", error="slow")
    assert letters.one().status is Status.RESOLVED


def test_a_redriven_letter_that_was_done_meanwhile_is_no_poison(letters: Letters) -> None:
    letters.bury(failed(order("e1")))
    letters.send_again()
    letters.inbox(contract())
    for _ in range(MOST_LOST):
        letters.advance(100)
        assert len(letters.deliver()) == 1, "its inbox decides about poison"
    letters.advance(100)
    do(letters, order("e1"))
    assert letters.deliver() == []
    assert letters.one().status is Status.RESOLVED


def test_an_event_that_is_being_done_is_not_buried_yet(letters: Letters) -> None:
    """Its worker was frozen: the source gave up the message, and the worker may still commit."""
    if letters.database.is_sqlite:
        return  # its one writer makes burials wait
    queue = letters.queue(max_deliveries=1, lease=10.0)
    source = letters.around(queue)
    letters.dispatch(source, order("e1"), order("e2"))
    for _ in range(2):
        ask(letters, queue, "fetch_transactions", 1)
    letters.inbox(contract())
    with letters.database.session() as frozen:
        lock = "SELECT pg_advisory_xact_lock({} # CAST(CAST('onceward_dedup' AS regclass) AS bigint))"
        frozen.execute_scalar(lock.format(key_of("billing:e1")))
        letters.clock.advance(11)
        ask(letters, source, "fetch_transactions", 10)
        assert [letter.message_id for letter in letters.find()] == ["e2"], "one does not hold up the others"
        with pytest.raises(Busy, match="processed right now"):
            letters.bury(failed(order("e1")))
    ask(letters, source, "fetch_transactions", 10)
    assert letters.count() == 2


def dead(history: tuple[Failure, ...], deliveries: int) -> DeadMessage:
    now = datetime.now(UTC)
    return DeadMessage(
        transaction_id="m1",
        transaction=None,
        reason=BurialReason.MAX_DELIVERIES,
        category=None,
        error="slow",
        deliveries=deliveries,
        enqueued_at=now,
        died_at=now,
        history=history,
    )


def test_a_message_whose_last_delivery_failed_is_no_poison_however_many_were_lost() -> None:
    at = "2026-01-01T00:00:00+00:00"
    ended = dead((Failure(at, "slow", 4, "SYSTEM"),), 4)
    lost = dead((Failure(at, "slow", 1, "SYSTEM"),), 4)
    categories = [burial_of_dead(each, consumer="c", origin="o").category for each in (ended, lost)]
    assert categories == [Category.INFRASTRUCTURE, Category.POISON]


@pytest.mark.req("CC-057")
def test_a_letter_with_an_expired_doubt_is_in_doubt_whatever_it_failed_with(letters: Letters) -> None:
    letters.inbox(contract())
    with letters.database.session() as session:
        session.execute(
            "INSERT INTO onceward_effects (consumer_id, tracking_id, name, event_day, effect_key, lock_token, state, "
            "intended_at, valid_for) VALUES ('billing', 'e1', 'charge', 0, 'k', 1, 'intended', 0, 60)"
        )
    letters.bury(failed(order("e1")), failed(order("e2")))
    assert {each.message_id: each.category for each in letters.find()} == {
        "e1": Category.IN_DOUBT,
        "e2": Category.INFRASTRUCTURE,
    }
    assert letters.count(Filter(category=Category.IN_DOUBT)) == 1
    letters.send_again(BILLING)
    letters.advance(120)
    for redelivered in letters.deliver():
        letters.settle(redelivered, "failed", error="slow")
    assert letters.count(Filter(category=Category.IN_DOUBT)) == 1
