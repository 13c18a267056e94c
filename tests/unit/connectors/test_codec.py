"""Transactions survive encoding, or are refused before it."""

from __future__ import annotations

import dataclasses
import enum
import logging
import pickle
import uuid
from collections import namedtuple
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace

from onceward.connectors.codec import (
    DecodeError,
    PayloadError,
    decode,
    decode_all,
    encode,
    encode_all,
    sanitize_metadata,
)
from onceward.errors import OncewardError
from onceward.testing.connectors import transactions
from onceward.transaction import ReadOnlyDict, Transaction

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SPAN = trace.SpanContext(
    trace_id=0x0AF7651916CD43DD8448EB211C80319C,
    span_id=0xB7AD6B7169203331,
    is_remote=False,
    trace_flags=trace.TraceFlags(1),
)


@dataclasses.dataclass
class Order:
    number: int


class Colour(enum.Enum):
    RED = "red"


class EqualsAll:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Explodes(dict):  # type: ignore[type-arg]
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("the-secret-value")

    __hash__ = None  # type: ignore[assignment]


Point = namedtuple("Point", "x y")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@given(transactions())
def test_every_field_comes_back_equal(transaction: Transaction) -> None:
    assert decode(encode(transaction)) == transaction


def test_a_time_in_another_zone_comes_back_as_the_same_instant() -> None:
    there = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    back = decode(encode(Transaction(payload={"at": there}, created_at=there)))
    assert back.payload == {"at": there}
    assert back.created_at == there


def test_what_is_encoded_is_a_snapshot() -> None:
    payload = [1]
    body = encode(Transaction(payload=payload))
    payload.append(2)
    assert decode(body).payload == [1]


REFUSED: dict[str, Any] = {
    "tuple": (1, 2),
    "Point": Point(1, 2),
    "set": {1},
    "frozenset": frozenset([1]),
    "Decimal": Decimal("1.5"),
    "UUID": uuid.UUID(int=1),
    "Order": Order(1),
    "Colour": Colour.RED,
    "float that is not a number": float("nan"),
    "datetime without a time zone": datetime(2026, 1, 1),
    "date": date(2026, 1, 1),
    "timedelta": timedelta(1),
    "int beyond 64 bits": 2**64,
    "str that is not valid text": "\ud800",
    "EqualsAll": EqualsAll(),
    "object": object(),
    "generator": (n for n in [1]),
    "type": int,
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"a": [0, {"b": v}]}])
def test_what_would_not_come_back_equal_is_refused_by_its_type(what: str, wrap: Any) -> None:
    with pytest.raises(
        PayloadError, match=rf"'the-id'.* payload holds a value of type {what}, .*convert it to str/int"
    ) as caught:
        encode(Transaction("the-id", wrap(REFUSED[what])))
    assert isinstance(caught.value, OncewardError)
    assert isinstance(caught.value, ValueError)


def test_an_int_below_64_bits_is_refused() -> None:
    with pytest.raises(PayloadError):
        encode(Transaction(payload=-(2**63) - 1))


def test_metadata_is_held_to_the_same_rule() -> None:
    with pytest.raises(PayloadError, match="metadata holds a value of type tuple"):
        encode(Transaction(metadata={"k": (1,)}))


@pytest.mark.parametrize("bad", [nested(100_000), endless()], ids=["deep", "endless"])
def test_payloads_without_an_end_are_refused(bad: Any) -> None:
    with pytest.raises(PayloadError, match="the-id"):
        encode(Transaction("the-id", bad))


@pytest.mark.parametrize("field", ["source", "correlation_id", "parent_id"])
@pytest.mark.parametrize("bad", [5, "\ud800"], ids=["number", "half a character"])
def test_the_other_fields_must_be_text(field: str, bad: Any) -> None:
    with pytest.raises(PayloadError, match="must be strings"):
        encode(Transaction(**{field: bad}))


def test_a_refusal_never_shows_the_payload() -> None:
    for payload in ({"k": {"the-secret-value"}}, "the-secret-value\ud800", Explodes(a=1), [Explodes(a=1)]):
        with pytest.raises(PayloadError) as caught:
            encode(Transaction(payload=payload))
        error = caught.value
        assert "the-secret-value" not in f"{error!r} {error.__cause__!r} {error.__context__!r}"
        assert pickle.loads(pickle.dumps(error)).args == error.args


def test_a_subclass_is_refused_because_its_fields_would_be_lost() -> None:
    class Priority(Transaction, frozen=True):
        level: int = 0

    with pytest.raises(TypeError, match="Priority"):
        encode(Priority())


@pytest.mark.parametrize("key", ["Authorization", "COOKIE", "x-api-key", "password", "private_key"])
def test_credentials_are_refused_by_name_on_the_way_out(key: str) -> None:
    with pytest.raises(PayloadError, match=key) as caught:
        encode(Transaction(metadata={key: "hunter2"}))
    assert "hunter2" not in str(caught.value)


def test_metadata_keys_must_be_strings() -> None:
    with pytest.raises(PayloadError, match="of type int"):
        encode(Transaction(metadata={1: "a"}))  # type: ignore[dict-item]


# Decoding.


@given(st.binary())
def test_rubbish_raises_a_decode_error_and_nothing_else(body: bytes) -> None:
    with pytest.raises(DecodeError, match=f"^{len(body)} bytes that are not a transaction"):
        decode(body)


@pytest.mark.parametrize(
    "fields",
    [
        [2, "id", None, {}, datetime.now(UTC)],
        [1, "", None, {}, datetime.now(UTC)],
        [1, 5, None, {}, datetime.now(UTC)],
        [1, "id", None, [], datetime.now(UTC)],
        [1, "id", None, {}, "2026-01-01T00:00:00"],
        [1, "id", None, {}],
        [1, "id", None, {}, datetime.now(UTC), 7],
    ],
    ids=["newer format", "empty id", "number as id", "list as metadata", "naive time", "short", "source"],
)
def test_what_is_almost_a_transaction_raises_a_decode_error(fields: list[Any]) -> None:
    with pytest.raises(DecodeError):
        decode(msgspec.msgpack.encode(fields))


def test_a_body_with_fields_of_a_later_version_is_read_without_them() -> None:
    now = datetime.now(UTC)
    body = msgspec.msgpack.encode([1, "id", 5, {}, now, None, None, None, "something new"])
    assert decode(body) == Transaction("id", 5, {}, now)


def test_incoming_metadata_is_sanitised(caplog: pytest.LogCaptureFixture) -> None:
    metadata = {
        "tenant": "a",
        "Cookie": "hunter2",
        5: "hunter2",
        "traceparent": "hunter2",
        "tracestate": "x=y",
    }
    body = msgspec.msgpack.encode([1, "id", None, metadata, datetime.now(UTC)])
    with caplog.at_level(logging.WARNING):
        assert decode(body).metadata == {"tenant": "a", "tracestate": "x=y"}
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "'Cookie', 5, 'traceparent'" in record.getMessage()
    assert "hunter2" not in record.getMessage()


def test_only_exact_names_count_as_credentials(caplog: pytest.LogCaptureFixture) -> None:
    metadata = {"secret_santa": 1, "cookies": 2, "token_count": 3}
    assert sanitize_metadata(metadata) == metadata
    assert caplog.records == []


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (TRACEPARENT, True),
        (TRACEPARENT.replace("00-", "01-", 1) + "-more", True),
        (TRACEPARENT + "-more", False),
        (TRACEPARENT + "\n", False),
        (TRACEPARENT.replace("00-", "ff-", 1), False),
        (TRACEPARENT.upper(), False),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01", False),
        ("", False),
        (None, False),
        (b"00", False),
    ],
)
def test_a_traceparent_is_kept_only_if_it_is_one(value: Any, kept: bool) -> None:
    assert ("traceparent" in sanitize_metadata({"traceparent": value})) is kept


# Traces.


def test_the_current_span_replaces_the_trace_in_the_metadata() -> None:
    old = {"tenant": "a", "traceparent": TRACEPARENT.replace("01", "00"), "tracestate": "old=1"}
    transaction = Transaction(metadata=old)
    with trace.use_span(trace.NonRecordingSpan(SPAN)):
        [body] = encode_all([transaction])
        assert encode(transaction) == body
    assert decode(body).metadata == {"tenant": "a", "traceparent": TRACEPARENT}
    assert transaction.metadata == old


def test_without_a_span_the_trace_in_the_metadata_stays() -> None:
    metadata = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
    assert decode(encode(Transaction(metadata=metadata))).metadata == metadata


def test_bodies_decoded_together_are_what_they_are_one_by_one() -> None:
    sent = [
        Transaction(id="plain", payload={"order": 1}),
        Transaction(id="rich", metadata={"tenant": "a"}, source="shop", correlation_id="c", parent_id="p"),
    ]
    bodies = [encode(each) for each in sent]
    bodies.append(
        msgspec.msgpack.encode([1, "secret", None, {"password": "x", "kept": 1}, sent[0].created_at])
    )
    together = decode_all(bodies)
    assert together == [decode(each) for each in bodies]
    assert together[:2] == sent
    assert together[2].metadata == {"kept": 1}
    assert all(type(each.metadata) is ReadOnlyDict for each in together)
    for wrong in (b"", b"\xc1", msgspec.msgpack.encode([1, "", None, {}, sent[0].created_at])):
        with pytest.raises(DecodeError):
            decode(wrong)
        with pytest.raises(DecodeError):
            decode_all([*bodies, wrong])
