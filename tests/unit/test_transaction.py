"""A transaction never changes, and never shows its payload."""

from __future__ import annotations

import copy
import pickle
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward import Transaction

FIELDS = ("id", "payload", "metadata", "created_at", "source", "correlation_id", "parent_id")


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_can_be_set_or_deleted(field: str) -> None:
    transaction = Transaction(id="t")
    before = getattr(transaction, field)
    with pytest.raises(AttributeError):
        setattr(transaction, field, "other")
    with pytest.raises(AttributeError):
        delattr(transaction, field)
    assert getattr(transaction, field) is before


def test_no_field_can_be_added() -> None:
    with pytest.raises(AttributeError):
        Transaction(id="t").attempts = 3  # type: ignore[attr-defined]


@pytest.mark.req("CC-053")
def test_a_new_id_is_a_uuid_of_version_7_with_the_time_of_now() -> None:
    before = time.time_ns() // 1_000_000
    ids = [Transaction().id for _ in range(1_000)]
    after = time.time_ns() // 1_000_000
    assert len(set(ids)) == 1_000
    for id_ in ids:
        made = uuid.UUID(id_)
        assert (made.version, made.variant, str(made)) == (7, uuid.RFC_4122, id_)
        assert before <= made.int >> 80 <= after


# ── id ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_id_is_made_when_none_is_given_and_is_another_each_time() -> None:
    ids = {Transaction().id for _ in range(1000)}
    assert len(ids) == 1000
    assert all(ids)


def test_transaction_id_is_another_name_of_id() -> None:
    assert Transaction(id="order-7").transaction_id == "order-7"


@pytest.mark.parametrize("bad", ["", None, 7, b"bytes", ["t"], True])
def test_an_id_that_is_no_text_or_empty_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="id must be a non-empty string"):
        Transaction(id=bad)


# ── metadata ────────────────────────────────────────────────────────────────────────────────────────────

CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": lambda metadata: metadata.__setitem__("a", 2),
    "add": lambda metadata: metadata.__setitem__("b", 2),
    "delete": lambda metadata: metadata.__delitem__("a"),
    "or": lambda metadata: metadata.__ior__({"b": 2}),
    "update": lambda metadata: metadata.update(b=2),
    "setdefault": lambda metadata: metadata.setdefault("b", 2),
    "pop": lambda metadata: metadata.pop("a"),
    "popitem": lambda metadata: metadata.popitem(),
    "clear": lambda metadata: metadata.clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_metadata_refuses_change_and_says_what_to_do_instead(change: Callable[[Any], Any]) -> None:
    transaction = Transaction(id="t", metadata={"a": 1})
    with pytest.raises(TypeError, match="derive"):
        change(transaction.metadata)
    assert transaction.metadata == {"a": 1}


def test_metadata_does_not_follow_the_dict_it_was_made_of() -> None:
    given = {"a": 1}
    transaction = Transaction(id="t", metadata=given)
    given["a"] = 2
    assert transaction.metadata == {"a": 1}


@pytest.mark.parametrize("given", [{"a": 1}, MappingProxyType({"a": 1})])
def test_metadata_is_taken_from_any_mapping(given: Any) -> None:
    assert Transaction(id="t", metadata=given).metadata == {"a": 1}


@pytest.mark.parametrize("bad", [None, "text", ["a"], 7])
def test_metadata_that_is_no_mapping_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="metadata must be a mapping"):
        Transaction(id="t", metadata=bad)


def test_metadata_is_empty_by_default_and_read_only_then_too() -> None:
    with pytest.raises(TypeError):
        Transaction().metadata["a"] = 1  # type: ignore[index]
    assert Transaction().metadata == {}


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────


def test_created_at_is_the_time_of_creation_in_utc() -> None:
    before = datetime.now(UTC)
    transaction = Transaction()
    assert before <= transaction.created_at <= datetime.now(UTC)
    assert transaction.created_at.utcoffset() == timedelta(0)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="time zone"):
        Transaction(created_at=datetime(2025, 1, 1))


def test_a_time_of_another_zone_is_kept_as_the_same_moment_in_utc() -> None:
    given = datetime(2025, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    transaction = Transaction(created_at=given)
    assert transaction.created_at == given
    assert transaction.created_at.utcoffset() == timedelta(0)


@pytest.mark.parametrize("bad", ["2025-01-01", 0, None])
def test_a_created_at_that_is_no_datetime_is_refused_by_name(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="created_at"):
        Transaction(created_at=bad)


# ── derive ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_derived_transaction_has_a_new_id_and_names_its_parent() -> None:
    parent = Transaction(id="p", payload=1, metadata={"a": 1}, source="s")
    child = parent.derive()
    assert child.id not in ("", "p")
    assert (child.parent_id, child.payload, child.metadata, child.source) == ("p", 1, {"a": 1}, "s")


def test_correlation_begins_with_the_first_transaction_and_goes_on() -> None:
    first = Transaction(id="a")
    second = first.derive(id="b")
    third = second.derive(id="c")
    assert (second.correlation_id, third.correlation_id) == ("a", "a")
    assert third.parent_id == "b"


def test_what_is_named_overrides_what_is_inherited() -> None:
    child = Transaction(id="p", payload=1).derive(id="c", payload=2, metadata={"b": 1}, correlation_id="w")
    assert (child.id, child.payload, child.metadata, child.correlation_id) == ("c", 2, {"b": 1}, "w")


def test_deriving_leaves_the_parent_as_it_was() -> None:
    parent = Transaction(id="p", payload=1, metadata={"a": 1})
    before = copy.deepcopy(parent)
    parent.derive(payload=2, metadata={"b": 2})
    assert parent == before


def test_a_derived_transaction_has_its_own_time() -> None:
    old = datetime(2020, 1, 1, tzinfo=UTC)
    assert Transaction(created_at=old).derive().created_at > old


def test_a_change_under_the_old_id_is_refused() -> None:
    with pytest.raises(ValueError, match="new id"):
        Transaction(id="p").derive(id="p", payload=2)


def test_deriving_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="paylod"):
        Transaction(id="p").derive(paylod=2)


# ── value ───────────────────────────────────────────────────────────────────────────────────────────────


def test_transactions_are_equal_when_all_their_fields_are() -> None:
    moment = datetime(2025, 1, 1, tzinfo=UTC)
    values: dict[str, Any] = {
        "id": "t",
        "payload": {"a": [1]},
        "metadata": {"m": 1},
        "created_at": moment,
        "source": "s",
        "correlation_id": "c",
        "parent_id": "p",
    }
    others = {**dict.fromkeys(FIELDS, "other"), "metadata": {}, "created_at": moment + timedelta(1)}
    assert Transaction(**values) == Transaction(**copy.deepcopy(values))
    for field in FIELDS:
        assert Transaction(**values) != Transaction(**{**values, field: others[field]})


def test_a_repr_shows_id_and_source_but_neither_payload_nor_metadata() -> None:
    text = repr(Transaction(id="t7", payload={"card": "4111"}, metadata={"token": "s3cret"}, source="shop"))
    assert "t7" in text
    assert "shop" in text
    assert not any(secret in text for secret in ("4111", "card", "s3cret", "token"))
    assert "4111" not in str(Transaction(id="t7", payload="4111"))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    id=st.text(min_size=1),
    payload=plain,
    metadata=st.dictionaries(st.text(), plain, max_size=3),
    source=st.none() | st.text(),
)
def test_any_transaction_survives_pickle_and_copy(
    id: str, payload: Any, metadata: dict[str, Any], source: str | None
) -> None:
    transaction = Transaction(id=id, payload=payload, metadata=metadata, source=source)
    for again in (
        pickle.loads(pickle.dumps(transaction)),
        copy.copy(transaction),
        copy.deepcopy(transaction),
    ):
        assert again == transaction


@pytest.mark.parametrize("through", [lambda t: pickle.loads(pickle.dumps(t)), copy.deepcopy, copy.copy])
def test_metadata_is_still_read_only_after_pickle_and_copy(through: Callable[[Transaction], Any]) -> None:
    again = through(Transaction(id="t", metadata={"a": {"b": 1}}))
    with pytest.raises(TypeError, match="read-only"):
        again.metadata["a"] = 2
