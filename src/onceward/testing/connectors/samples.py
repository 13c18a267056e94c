"""Transactions to test with."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from hypothesis import strategies as st

from onceward.task.exceptions import ExceptionCategory, TransactionException
from onceward.transaction import Transaction


def payloads() -> st.SearchStrategy[Any]:
    """Every kind of payload that a connector must carry."""
    plain = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary()
        | st.datetimes(timezones=st.just(UTC))
    )
    return st.recursive(
        plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
    )


def transactions() -> st.SearchStrategy[Transaction]:
    names = st.none() | st.text()
    return st.builds(
        Transaction,
        id=st.text(min_size=1),
        payload=payloads(),
        metadata=st.dictionaries(st.text().map("x-".__add__), payloads(), max_size=3),
        created_at=st.datetimes(
            datetime(1970, 1, 2),
            datetime(2200, 1, 1),
            timezones=st.sampled_from([UTC, timezone(timedelta(hours=2))]),
        ),
        source=names,
        correlation_id=names,
        parent_id=names,
    )


SYSTEM_FAILURE = TransactionException("it went wrong", ExceptionCategory.SYSTEM)
BUSINESS_FAILURE = TransactionException("card expired", ExceptionCategory.BUSINESS)


def numbered(start: int, end: int) -> list[Transaction]:
    return [Transaction(payload=number) for number in range(start, end)]


def payloads_of(batch: Sequence[Transaction]) -> list[Any]:
    return [transaction.payload for transaction in batch]
