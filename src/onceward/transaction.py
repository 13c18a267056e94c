"""The unit of work that connectors, engines and tasks exchange, and how a connector learns its end."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from onceward._ids import new_id

if TYPE_CHECKING:
    from onceward.task.exceptions import TransactionException


class ReadOnlyDict(dict[str, Any]):
    """A read-only dict. Unlike `MappingProxyType`, it pickles and serializes like a dict."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a transaction's metadata is read-only; use transaction.derive(metadata=…)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)


_EMPTY: Mapping[str, Any] = ReadOnlyDict()


def _in_utc(value: Any) -> datetime:
    if not isinstance(value, datetime):
        raise TypeError(f"a transaction's created_at must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise ValueError("a transaction's created_at needs a time zone, for example datetime.now(UTC)")
    return value.astimezone(UTC)


class Transaction(msgspec.Struct, frozen=True, weakref=True):
    """Something to do once; immutable.

    `id` is globally unique and stays the same across attempts and from producer to consumer. To change a transaction,
    `derive` a new one. The engine never inspects `payload`; `metadata` is system context (trace context, routing),
    never business data and never a credential.
    """

    id: str = msgspec.field(default_factory=new_id)
    payload: Any = None
    metadata: Mapping[str, Any] = _EMPTY
    created_at: datetime = msgspec.field(default_factory=partial(datetime.now, UTC))
    source: str | None = None
    correlation_id: str | None = None
    parent_id: str | None = None

    def __post_init__(self) -> None:
        if type(self.id) is not str or not self.id:
            found = repr(self.id) if isinstance(self.id, str) else type(self.id).__name__
            raise ValueError(
                f"a transaction's id must be a non-empty string, not {found}; pass a payload as payload=…"
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
        """Same as `id`."""
        return self.id

    def derive(self, **changes: Any) -> Transaction:
        """Return a transaction with a new id, caused by this one.

        `parent_id` is this one's id; `correlation_id` is inherited, or else this one's id. `changes` override any
        field. Raises ValueError if they reuse this one's id.
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
        # Without the payload: a repr ends up in logs and tracebacks.
        return (
            f"Transaction(id={self.id!r}, source={self.source!r}, created_at={self.created_at.isoformat()})"
        )


class Verdict(StrEnum):
    """How the engine settles a transaction with its connector."""

    DONE = "done"
    """The success handler has returned: acknowledge."""
    FAILED = "failed"
    """The lifecycle failed: the connector's failure rule decides between redelivery and dead letter."""
    RETURNED = "returned"
    """Not started, or postponed: deliver it again after `delay`, without counting this delivery."""


class Settlement(msgspec.Struct, frozen=True):
    """The end of one delivery. `transaction` is the same object the connector delivered."""

    transaction: Transaction
    verdict: Verdict
    error: TransactionException | None = None
    delay: float = 0.0
    """Seconds until a returned transaction may be delivered again."""
