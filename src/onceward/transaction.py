"""The unit of work: all that connectors, engines and tasks exchange."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

if TYPE_CHECKING:
    from onceward.task.exceptions import TransactionException


class ReadOnlyDict(dict[str, Any]):
    """A dict that refuses change. Unlike `MappingProxyType` it pickles and serialises as a dict does."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a transaction's metadata is read-only; use transaction.derive(metadata=…)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)


_EMPTY: Mapping[str, Any] = ReadOnlyDict()


def _new_id() -> str:
    return uuid.uuid4().hex


def _now() -> datetime:
    return datetime.now(UTC)


def _in_utc(value: Any) -> datetime:
    if not isinstance(value, datetime):
        raise TypeError(f"a transaction's created_at must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise ValueError("a transaction's created_at needs a time zone, for example datetime.now(UTC)")
    return value.astimezone(UTC)


class Transaction(msgspec.Struct, frozen=True, weakref=True):
    """Something to do once, immutable from birth to settlement.

    `id` is globally unique and stays the same over all attempts, and from producer to consumer. A change
    is another transaction: see `derive`. The engine never looks into `payload`; `metadata` is system
    context (trace context, routing), never business data and never a credential.
    """

    id: str = msgspec.field(default_factory=_new_id)
    payload: Any = None
    metadata: Mapping[str, Any] = _EMPTY
    created_at: datetime = msgspec.field(default_factory=_now)
    source: str | None = None
    correlation_id: str | None = None
    parent_id: str | None = None

    def __post_init__(self) -> None:
        if type(self.id) is not str or not self.id:
            shown = repr(self.id) if isinstance(self.id, str) else type(self.id).__name__
            raise ValueError(
                f"a transaction's id must be a non-empty string, not {shown}; a payload is given as payload=…"
            )
        if type(self.metadata) is not ReadOnlyDict:
            if not isinstance(self.metadata, Mapping):
                raise TypeError(
                    f"a transaction's metadata must be a mapping, not {type(self.metadata).__name__}"
                )
            msgspec.structs.force_setattr(self, "metadata", ReadOnlyDict(self.metadata))
        if self.created_at.__class__ is not datetime or self.created_at.tzinfo is not UTC:
            msgspec.structs.force_setattr(self, "created_at", _in_utc(self.created_at))

    @property
    def transaction_id(self) -> str:
        """The same as `id`."""
        return self.id

    def derive(self, **changes: Any) -> Transaction:
        """A new transaction with a new id, caused by this one.

        `parent_id` becomes this one's id, and `correlation_id` stays, or begins here. Anything named in
        `changes` overrides that, except the id of this transaction itself: a change needs a new id.
        """
        if changes.get("id") == self.id:
            raise ValueError(f"a changed transaction needs a new id; {self.id!r} names the old one")
        values = {
            "payload": self.payload,
            "metadata": self.metadata,
            "source": self.source,
            "correlation_id": self.correlation_id or self.id,
            "parent_id": self.id,
        }
        return Transaction(**{**values, **changes})

    def __repr__(self) -> str:
        # No payload: a repr ends up in logs and tracebacks.
        return (
            f"Transaction(id={self.id!r}, source={self.source!r}, created_at={self.created_at.isoformat()})"
        )


# What the engine tells a connector about a transaction it fetched.


class Verdict(StrEnum):
    DONE = "done"
    """The success handler has ended: acknowledge."""
    FAILED = "failed"
    """The lifecycle ended in failure: the connector's failure rule decides, redelivery or dead letter."""
    RETURNED = "returned"
    """It was not started, or could not be yet: give it to somebody else after `delay`, and do not count this
    delivery."""


class Settlement(msgspec.Struct, frozen=True):
    """The end of one delivery. `transaction` is the very object the connector handed out."""

    transaction: Transaction
    verdict: Verdict
    error: TransactionException | None = None
    delay: float = 0.0
    """Seconds until something returned may be handed out again."""
