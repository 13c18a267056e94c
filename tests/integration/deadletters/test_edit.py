"""A letter's payload is corrected: the original stays, the edit is tried first, and it runs at most once."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.connectors import AsyncMemoryConnector, MemoryConnector
from onceward.connectors.codec import decode, encode
from onceward.deadletters import EditRefusedError, Filter
from onceward.deadletters.burial import burial_of
from onceward.deadletters.edits import parse
from onceward.errors import ConfigurationError
from tests.support.deadletters.world import FIXED, Letters, burial, contract, order

pytest_plugins = ("tests.support.databases", "tests.support.deadletters.site")

pytestmark = pytest.mark.req("CC-082")

WANTED = Filter(consumer="billing", event_type="order.paid")


class Bench:
    """A consumer that bills, and refuses an amount that is not a number."""

    def __init__(self, letters: Letters) -> None:
        self.letters = letters
        letters.database.do("CREATE TABLE bills (id VARCHAR(60) PRIMARY KEY, amount INTEGER NOT NULL)")
        self.inbox = letters.inbox(contract())
        asynchronous = letters.database.asynchronous

        def values(transaction: Transaction) -> dict[str, Any]:
            return {"id": transaction.id, "amount": int(transaction.payload["amount"])}

        insert = "INSERT INTO bills VALUES (:id, :amount)"

        class AsyncBill(AsyncConsumerTask):
            contract = contract()

            async def process_transaction(self, transaction: Transaction, session: Any) -> None:
                await session.execute(insert, values(transaction))

        class Bill(ConsumerTask):
            contract = contract()

            def process_transaction(self, transaction: Transaction, session: Any) -> None:
                session.execute(insert, values(transaction))

        source = (AsyncMemoryConnector if asynchronous else MemoryConnector)()
        self.source = letters.around(source)
        kind: Any = AsyncBill if asynchronous else Bill
        self.task = kind({"source": self.source}, {"inbox": self.inbox})

    def bury(self, transaction: Transaction) -> int:
        self.letters.bury(burial_of(transaction, consumer="billing", error=ValueError("not a number")))
        return int(self.letters.find()[-1].id)

    def edit(self, letter_id: int, payload: Any, **more: Any) -> Any:
        given = {"task": self.task, "cause": "amount as text", "operator": "ann", **more}
        return self.letters.edit(letter_id, payload, **given)

    def redrive(self) -> None:
        self.letters.redrive(WANTED, rca=FIXED, operator="ann")
        self.letters.run(self.task.consume_transactions())

    def bills(self) -> list[tuple[str, int]]:
        return [(row["id"], row["amount"]) for row in self.letters.rows("SELECT * FROM bills ORDER BY id")]


@pytest.fixture
def bench(letters: Letters) -> Bench:
    return Bench(letters)


def test_an_edited_letter_is_delivered_with_its_new_payload(bench: Bench) -> None:
    dead = order("o1", {"amount": "seven", "note": "ä"})
    letter_id = bench.bury(dead)
    before = bench.letters.body(letter_id)
    prediction = bench.edit(letter_id, {"amount": 7, "note": "ä"})
    assert prediction.outcome == "succeed"
    assert bench.bills() == [], "that was only a dry run"
    letter = bench.letters.one(ids=(letter_id,))
    assert bench.letters.body(letter_id) == before, "the delivered bytes stay"
    assert letter.digest == hashlib.sha256(before).hexdigest()
    assert (letter.edited_by, letter.edit_cause, letter.edited_at is None) == ("ann", "amount as text", False)
    edited = decode(bench.letters.edited_body(letter_id))
    assert (edited.id, edited.created_at, edited.metadata) == (dead.id, dead.created_at, dead.metadata)
    bench.redrive()
    assert bench.bills() == [("o1", 7)]
    assert bench.letters.one(ids=(letter_id,)).status == "resolved"


def test_the_audit_has_who_why_and_both_digests(bench: Bench) -> None:
    letter_id = bench.bury(order("o1", {"amount": "seven"}))
    original = hashlib.sha256(bench.letters.body(letter_id)).hexdigest()
    bench.edit(letter_id, {"amount": 7})
    first = hashlib.sha256(bench.letters.edited_body(letter_id)).hexdigest()
    bench.edit(letter_id, {"amount": 8}, cause="typo", operator="bob")
    second = hashlib.sha256(bench.letters.edited_body(letter_id)).hexdigest()
    by_bob, by_ann = (json.loads(row["details"]) for row in bench.letters.audit())
    assert (by_ann["before"], by_ann["after"], by_ann["original"]) == (original, first, original)
    assert (by_bob["before"], by_bob["after"], by_bob["original"]) == (first, second, original)
    assert (by_bob["cause"], by_bob["letter"], by_bob["message_id"]) == ("typo", letter_id, "o1")
    assert bench.letters.verify_audit().broken is None


def test_an_edit_that_would_die_again_is_refused(bench: Bench) -> None:
    letter_id = bench.bury(order("o1", {"amount": "seven"}))
    with pytest.raises(EditRefusedError, match="would die again with this payload: ValueError"):
        bench.edit(letter_id, {"amount": "eight"})
    assert bench.letters.edited_body(letter_id) is None
    assert bench.letters.audit() == []


def test_an_edit_of_an_applied_event_is_refused_and_never_runs(bench: Bench) -> None:
    applied = order("o1", {"amount": 7})
    bench.letters.dispatch(bench.source, applied)
    bench.letters.run(bench.task.consume_transactions())
    late = bench.bury(order("o1", {"amount": 9}))
    with pytest.raises(EditRefusedError, match="done before with another payload or event type"):
        bench.edit(late, {"amount": 8})
    waiting = order("o2", {"amount": "x"})
    letter_id = bench.bury(waiting)
    bench.edit(letter_id, {"amount": 2})
    fixed = Transaction(
        id="o2", payload={"amount": 5}, metadata=waiting.metadata, created_at=waiting.created_at
    )
    bench.letters.dispatch(bench.source, fixed)  # the producer corrected it, too
    bench.letters.run(bench.task.consume_transactions())
    bench.letters.redrive(Filter(consumer="billing", ids=(letter_id,)), rca=FIXED, operator="ann")
    bench.letters.run(bench.task.consume_transactions())
    assert bench.bills() == [("o1", 7), ("o2", 5)]
    assert bench.letters.one(ids=(letter_id,)).category == "contract", "it died again, as a conflict"


def test_the_same_payload_changes_nothing(bench: Bench) -> None:
    letter_id = bench.bury(order("o1", {"amount": 1, "b": [True]}))
    assert bench.edit(letter_id, {"b": [True], "amount": 1}) is None
    assert bench.letters.audit() == []
    assert bench.edit(letter_id, {"b": [1], "amount": 1}) is not None, "1 is not true"


def test_only_open_letters_are_edited_and_only_as_they_were_read(bench: Bench) -> None:
    letter_id = bench.bury(order("o1", {"amount": "x"}))
    draft = bench.letters.core("draft", letter_id)
    prediction = bench.edit(letter_id, {"amount": 1}, operator="bob")
    body = draft.with_payload({"amount": 2})
    with pytest.raises(EditRefusedError, match="edited meanwhile by bob"):
        bench.letters.core("store_edit", draft, body, "x", "ann", prediction)
    fresh = bench.letters.core("draft", letter_id)
    bench.letters.redrive(WANTED, rca=FIXED, operator="ann")
    with pytest.raises(EditRefusedError, match="is redriven by now"):
        bench.letters.core("store_edit", fresh, body, "x", "ann", prediction)
    with pytest.raises(EditRefusedError, match="is redriven; only open"):
        bench.edit(letter_id, {"amount": 2})
    with pytest.raises(ConfigurationError, match="there is no dead letter 99"):
        bench.edit(99, {})


@pytest.mark.parametrize("more", [{"cause": " "}, {"operator": ""}])
def test_cause_and_operator_are_needed(bench: Bench, more: dict[str, str]) -> None:
    letter_id = bench.bury(order("o1", {"amount": "x"}))
    with pytest.raises(ConfigurationError):
        bench.edit(letter_id, {"amount": 1}, **more)
    assert bench.letters.edited_body(letter_id) is None


def test_a_task_of_another_consumer_is_refused(bench: Bench) -> None:
    bench.letters.bury(burial("other", consumer="shipping"))
    (letter,) = bench.letters.find()
    with pytest.raises(ConfigurationError, match="belong to 'shipping'"):
        bench.edit(letter.id, {"amount": 1})


def test_json_of_a_queue_keeps_its_envelope(bench: Bench) -> None:
    message = {
        "tracking_id": "o1",
        "event_type": "order.paid",
        "created_at": "2026-01-01T00:00:00+00:00",
        "payload": {"amount": "x"},
    }
    bench.letters.bury(burial_of(message, consumer="billing", error=ValueError("no")))
    (letter,) = bench.letters.find()
    bench.edit(letter.id, {"amount": 3})
    assert json.loads(bench.letters.edited_body(letter.id)) == {**message, "payload": {"amount": 3}}
    bench.redrive()
    assert bench.bills() == [("o1", 3)]


def test_files_are_payloads_or_whole_bodies(bench: Bench) -> None:
    dead = order("o1", {"amount": "x"})
    draft = bench.letters.core("draft", bench.bury(dead))
    assert decode(draft.with_file(b'{"amount": 1}')).payload == {"amount": 1}
    whole = encode(Transaction(id="o1", payload={"amount": b"\0"}, created_at=dead.created_at))
    assert draft.with_file(whole) == whole
    with pytest.raises(EditRefusedError, match="another transaction, o9"):
        draft.with_file(encode(order("o9")))
    for text in ("{", "NaN", "\xff", '{"amount": 1, "amount": 2}'):
        with pytest.raises(EditRefusedError, match="not JSON"):
            draft.with_file(text.encode("latin-1"))
    with pytest.raises(EditRefusedError):
        parse("[" * 100_000)
    for text in ('{"amount": 1e400}', "[-1e309]"):
        with pytest.raises(EditRefusedError, match="too large to be stored"):
            draft.with_file(text.encode())
    assert decode(draft.with_file(b'{"amount": 1.5e308}')).payload == {"amount": 1.5e308}


def test_what_an_editor_cannot_show_needs_a_file(bench: Bench) -> None:
    binary = bench.letters.core("draft", bench.bury(order("o1", {"amount": b"\0"})))
    with pytest.raises(EditRefusedError, match="JSON cannot express"):
        binary.as_text()
    infinite = bench.letters.core("draft", bench.bury(order("o2", {"amount": float("inf")})))
    with pytest.raises(EditRefusedError, match="JSON cannot express"):
        infinite.as_text()
    bench.letters.bury(burial("junk", body=b"\x00\xff"))
    junk = bench.letters.core("draft", bench.letters.find()[-1].id)
    with pytest.raises(EditRefusedError, match="not a transaction and not JSON"):
        junk.as_text()
    assert junk.changes(junk.with_file(b'{"amount": 1}'))
