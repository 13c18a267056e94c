"""From a failure to a burial, and from its bytes back to the message."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from onceward import Transaction, _secrets
from onceward.connectors.codec import DecodeError, decode, encode
from onceward.connectors.lease_rules import (
    BurialReason,
    DeadMessage,
    describe_failure,
    read_dead_message,
)
from onceward.deadletters import Category, Failure
from onceward.deadletters.burial import burial_of, burial_of_dead
from onceward.deadletters.letter import transaction_of
from onceward.errors import ConfigurationError
from onceward.inbox import Event
from onceward.inbox.errors import Breach, ContractError
from onceward.queue.messages import Entries, QueueMessage
from onceward.task.exceptions import ExceptionCategory, TransactionException

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def buried(thing: Any, error: BaseException | str = "failed", **more: Any) -> Any:
    return burial_of(thing, consumer="billing", error=error, **more)


def back(burial: Any) -> Transaction:
    return transaction_of(
        burial.body,
        message_id=burial.message_id,
        event_at=burial.event_at,
        first_failed_at=burial.first_failed_at,
    )


def message(payload: Any, raw: bytes | None = None, **more: Any) -> QueueMessage:
    body = json.dumps(payload).encode() if raw is None else raw
    return QueueMessage("orders", "billing", "1600000000000-0", payload, more.get("deliveries"), body)


@pytest.mark.req("CC-050")
@pytest.mark.parametrize(
    ("error", "category"),
    [
        (ContractError("x", Breach.SCHEMA), Category.CONTRACT),
        (ContractError("x", Breach.CONFLICT), Category.CONTRACT),
        (ContractError("x", Breach.POISON), Category.POISON),
        (TransactionException("x", ExceptionCategory.BUSINESS), Category.BUSINESS),
        (TransactionException("x", ExceptionCategory.SYSTEM), Category.INFRASTRUCTURE),
        (TransactionException("x", ExceptionCategory.TIMEOUT), Category.INFRASTRUCTURE),
        (ConnectionError("x"), Category.INFRASTRUCTURE),
        (DecodeError("x"), Category.CONTRACT),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), Category.CONTRACT),
        ("in words", Category.INFRASTRUCTURE),
    ],
    ids=repr,
)
def test_the_category_follows_from_the_error(error: Any, category: Category) -> None:
    burial = buried(message({"tracking_id": "o1"}), error)
    assert burial.category is category
    assert burial.history[0].category == category


def test_a_category_of_yours_goes_before_that() -> None:
    assert buried(message({}), "x", category="business").category is Category.BUSINESS


@pytest.mark.req("CC-050")
def test_a_message_is_kept_as_the_bytes_that_came() -> None:
    raw = b'{"tracking_id":  "o1", "event_type": "order.paid",\n "aggregate_id": "a", "sequence": 2}'
    given = message(json.loads(raw), raw, deliveries=4)
    burial = buried(given, ConnectionError("down"))
    assert (burial.body, burial.message_id, burial.origin) == (raw, "o1", "redis stream orders")
    assert (burial.event_type, burial.aggregate_id, burial.sequence) == ("order.paid", "a", 2)
    assert (burial.attempts, burial.error) == (4, "ConnectionError: down")
    assert [(each.attempt, each.error) for each in burial.history] == [(4, "ConnectionError: down")]


@pytest.mark.parametrize("enveloped", [True, False])
@pytest.mark.parametrize("created_at", [None, "2025-05-05T12:00:00+00:00"])
@pytest.mark.parametrize("tracking_id", ["o1", None])
def test_a_message_comes_back_as_the_event_it_was(
    enveloped: bool, created_at: str | None, tracking_id: str | None
) -> None:
    """For the inbox, the two are the same event: same id, same day, same payload."""
    head = {"event_type": "order.paid", "aggregate_id": "a", "sequence": 2, "schema_version": 3}
    head |= {} if created_at is None else {"created_at": created_at}
    head |= {} if tracking_id is None else {"tracking_id": tracking_id}
    given = message({**head, "payload": {"amount": 1}} if enveloped else {**head, "amount": 1})
    was, now = Event.of(given), Event.of(back(buried(given)))
    for field in ("tracking_id", "day", "digest", "event_type", "aggregate_id", "sequence", "schema_version"):
        assert getattr(now, field) == getattr(was, field), field


@pytest.mark.parametrize("payload", [None, 7, "text", [1, 2], {"a": {"b": None}}, 1.5, True])
def test_any_json_comes_back(payload: Any) -> None:
    transaction = back(buried(message(payload)))
    assert (transaction.id, transaction.payload) == ("orders:1600000000000-0", payload)
    assert transaction.created_at == datetime.fromtimestamp(1_600_000_000, UTC)


def test_an_entry_that_is_no_json_is_kept_too() -> None:
    entries = Entries("orders", "billing")
    entries.add(b"1-0", [b"data", b"{broken"], 1)
    entries.add(b"2-0", [b"other", b"\xff"], 1)
    error = entries.error()
    broken, strange = (buried(each, error) for each in error.entries)
    assert (broken.body, broken.message_id, broken.category) == (b"{broken", "orders:1-0", Category.CONTRACT)
    assert strange.body != b""
    for burial in (broken, strange):
        with pytest.raises(DecodeError):
            back(burial)


def test_raw_bytes_take_no_part_in_what_a_message_is() -> None:
    entries = Entries("orders", "billing")
    entries.add(b"1-0", [b"data", b'{"a": 1}'], 1)
    (read,) = entries.messages
    made = QueueMessage("orders", "billing", "1-0", {"a": 1})
    assert read.raw == b'{"a": 1}'
    assert read == made
    assert hash(read) == hash(made)
    assert "raw" not in repr(read)


def test_a_transaction_comes_back_equal_with_its_trace() -> None:
    given = Transaction(
        id="o1",
        payload={"a": b"\x00"},
        created_at=WHEN,
        metadata={"event_type": "t", "traceparent": TRACEPARENT},
    )
    burial = buried(given)
    assert back(burial) == given
    assert (burial.message_id, burial.trace_id, burial.event_type) == ("o1", TRACE, "t")
    assert buried(decode(encode(given))).body == burial.body, (
        "burying a redelivered message gives the same bytes"
    )


def test_an_event_and_a_mapping_come_back_as_the_event() -> None:
    event = Event(
        tracking_id="e1", event_type="t", created_at=WHEN, payload={"x": 1}, aggregate_id="a", sequence=1
    )
    assert Event.of(back(buried(event))) == event
    mapping = {"tracking_id": "m1", "created_at": WHEN.isoformat(), "x": 1}
    now = Event.of(back(buried(mapping)))
    assert (now.tracking_id, now.day, now.digest) == ("m1", Event.of(mapping).day, Event.of(mapping).digest)


def test_a_history_of_yours_is_kept() -> None:
    lines = (
        Failure("2026-01-01T00:00:00+00:00", "first", 1),
        Failure("2026-01-02T00:00:00+00:00", "second", 2),
    )
    burial = buried(message({}), "second", history=lines)
    assert (burial.history, burial.attempts) == (lines, 2)
    assert burial.first_failed_at == datetime(2026, 1, 1, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("thing", [7, object(), {"no": "id"}])
def test_what_cannot_be_reported_apart_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="Burial"):
        buried(thing)


def test_a_burial_needs_a_consumer_and_bytes() -> None:
    with pytest.raises(ConfigurationError, match="by consumer"):
        burial_of(message({}), consumer="", error="x")
    with pytest.raises(ValueError, match="category"):
        buried(message({}), category="category of mine")


# ── a connector's own dead letters ──────────────────────────────────────────────────────────────────────


def dead_message(*failed: int, deliveries: int = 5, **more: Any) -> DeadMessage:
    values: dict[str, Any] = {
        "key": (7, 100.5),
        "body": b"x",
        "transaction_id": "o1",
        "transaction": None,
        "reason": BurialReason.MAX_DELIVERIES,
        "category": ExceptionCategory.SYSTEM if failed else None,
        "error": "SYSTEM: down" if failed else None,
        "deliveries": deliveries,
        "enqueued_at": datetime.fromtimestamp(1.0, UTC),
        "died_at": datetime.fromtimestamp(100.5, UTC),
        "history": tuple(
            Failure(f"2026-01-01T00:00:0{number}+00:00", "down", number, "SYSTEM") for number in failed
        ),
    }
    return DeadMessage(**{**values, **more})


@pytest.mark.parametrize(
    ("dead", "category"),
    [
        (dead_message(1, 2, 3, 4, 5), Category.INFRASTRUCTURE),
        (dead_message(1, 2, 3, 5), Category.INFRASTRUCTURE),
        (dead_message(1, 2, 4), Category.INFRASTRUCTURE),
        (dead_message(1, 2), Category.POISON),
        (dead_message(), Category.POISON),
        (dead_message(deliveries=1), Category.POISON),
        (dead_message(deliveries=0, reason=BurialReason.UNDECODABLE, error="junk"), Category.CONTRACT),
        (dead_message(deliveries=2, reason=BurialReason.TRIMMED), Category.INFRASTRUCTURE),
        (dead_message(deliveries=1, category=ExceptionCategory.BUSINESS, error="no"), Category.BUSINESS),
    ],
)
def test_poison_is_what_never_ends_not_what_was_lost_once(dead: DeadMessage, category: Category) -> None:
    burial = burial_of_dead(dead, consumer="billing", origin="queue")
    assert burial.category is category
    assert burial == burial_of_dead(dead, consumer="billing", origin="queue")
    assert burial.history
    if category is Category.POISON or dead.history:
        assert [each.attempt for each in burial.history] == list(range(1, dead.deliveries + 1))


def test_one_without_an_id_has_one_that_no_other_gets() -> None:
    one = burial_of_dead(dead_message(transaction_id=None), consumer="billing", origin="queue")
    later = burial_of_dead(
        dead_message(transaction_id=None, key=(7, 200.0)), consumer="billing", origin="queue"
    )
    assert one.message_id != later.message_id


def test_letters_are_found_by_names_that_do_not_depend_on_what_else_the_process_has_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_secrets, "_known", {})
    monkeypatch.setattr(_secrets, "_known_pattern", None)
    _secrets.remember("redis://u:billing-2@h/orders")
    origin = "postgresql:///run/billing-2:5432/shop/orders"
    burial = burial_of(
        Transaction(id="o1", payload={}), consumer="billing-2", origin=origin, error="no billing-2"
    )
    assert (burial.consumer, burial.origin, burial.error) == ("billing-2", origin, "no ***")
    shown = buried(Transaction(id="o1", payload={}), origin="redis://u:hunter2@h/orders")
    assert shown.origin == "redis://u:***@h/orders"


@pytest.mark.req("CC-147")
def test_a_death_is_recognized_by_a_process_that_knows_other_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = dead_message(history=(Failure(AT, "no billing-2", 1), Failure(AT, "at redis://u:hunter2@h/", 2)))
    before = burial_of_dead(dead, consumer="billing", origin="queue")
    monkeypatch.setattr(_secrets, "_known", {})
    monkeypatch.setattr(_secrets, "_known_pattern", None)
    _secrets.remember("redis://u:billing-2@h/orders")
    assert burial_of_dead(dead, consumer="billing", origin="queue").history == before.history
    assert "hunter2" not in str(before.history)


AT = "1970-01-01T00:00:07+00:00"


@pytest.mark.parametrize(
    ("error", "details"),
    [
        (None, ""),
        (
            TransactionException("no \u2028 \ud800 account", ExceptionCategory.SYSTEM),
            ',"error":"SYSTEM: no \u2028 \\\\ud800 account","category":"SYSTEM"',
        ),
        (
            ContractError("x", Breach.SCHEMA),
            ',"error":"BUSINESS: x","category":"BUSINESS","kind":"schema"',
        ),
    ],
)
def test_a_failure_is_one_line_in_the_source_and_is_read_back(error: Any, details: str) -> None:
    """Queues of earlier versions contain such lines."""
    category, text, line = describe_failure(error, 3, 7.0)
    assert line == f'{{"delivery":3,"at":"{AT}"{details}}}\n'
    dead = read_dead_message((1, 9.0), "o1", b"x", "failed", category, text, 3, 1.0, 9.0, line + line)
    assert dead.history == (Failure(AT, text or "", 3, category),) * 2
    assert dead.kind == ("schema" if isinstance(error, ContractError) else None)
