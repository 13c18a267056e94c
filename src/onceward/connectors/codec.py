"""Transactions as bytes: MessagePack, the same on every wire that has no format of its own.

A body is an array `[1, id, payload, metadata, created_at, source, correlation_id, parent_id]`. The leading
number is the version of the format. Later versions may append fields, which this one ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from onceward.connectors.metadata import (
    all_welcome,
    current_trace_context,
    is_credential,
    sanitise_metadata,
    with_trace_context,
)
from onceward.errors import OncewardError
from onceward.transaction import ReadOnlyDict, Transaction

__all__ = ["DecodeError", "PayloadError", "decode", "encode", "encode_all", "sanitise_metadata"]


class PayloadError(OncewardError, ValueError):
    """A transaction holds something that would not come back equal from a wire. Nothing was sent."""


class DecodeError(OncewardError, ValueError):
    """These bytes are not a transaction that this version can read."""


class _Body(msgspec.Struct, array_like=True, tag=1, gc=False):
    id: str
    payload: Any
    metadata: dict[Any, Any]
    created_at: datetime
    source: str | None = None
    correlation_id: str | None = None
    parent_id: str | None = None


_FLAWS = {
    datetime: " without a time zone",
    float: " that is not a number",
    int: " beyond 64 bits",
    str: " that is not valid text",
}
"""What can be wrong with a value of a type that is right."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)
_NO_METADATA = ReadOnlyDict()


def encode(transaction: Transaction) -> bytes:
    """The bytes of a transaction, with the current trace context in its metadata.

    Raises `PayloadError` for whatever `decode` would not give back equal.
    """
    return encode_with(current_trace_context(), transaction)


def encode_all(transactions: Iterable[Transaction]) -> list[bytes]:
    """`encode` for each, which looks up the trace context only once."""
    trace_context = current_trace_context()
    return [encode_with(trace_context, transaction) for transaction in transactions]


def decode(body: bytes) -> Transaction:
    """The transaction that was encoded, with sanitised metadata. Raises `DecodeError` for anything else."""
    try:
        wire = _decoder.decode(body)
        return Transaction(
            wire.id,
            wire.payload,
            _welcome(wire.metadata) if wire.metadata else _NO_METADATA,
            wire.created_at,
            wire.source,
            wire.correlation_id,
            wire.parent_id,
        )
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # The reasons name types and positions in the body, never its values.
        raise DecodeError(f"{len(body)} bytes that are not a transaction: {error}") from None


def _welcome(metadata: dict[Any, Any]) -> ReadOnlyDict:
    return ReadOnlyDict(metadata if all_welcome(metadata) else sanitise_metadata(metadata))


def encode_with(trace_context: Mapping[str, str], transaction: Transaction) -> bytes:
    """`encode` with this trace context, for whoever encodes many in one."""
    if type(transaction) is not Transaction:
        # A subclass may have fields that the wire does not carry.
        raise TypeError(f"only a Transaction can be sent, not a {type(transaction).__name__}")
    metadata: Mapping[str, Any] = transaction.metadata
    if metadata:
        _check_keys(transaction)
    if trace_context:
        metadata = with_trace_context(metadata, trace_context)
    wire = _Body(
        transaction.id,
        transaction.payload,
        metadata,  # type: ignore[arg-type]  # any dict, this one is read-only
        transaction.created_at,
        transaction.source,
        transaction.correlation_id,
        transaction.parent_id,
    )
    try:
        body = _encoder.encode(wire)
        same = _decoder.decode(body) == wire
    except Exception:  # noqa: BLE001 - objects in a payload run code of their own
        same = False
    if not same:
        raise _refusal(transaction)  # outside the handler: the first error may quote the payload
    return body


def _check_keys(transaction: Transaction) -> None:
    for key in transaction.metadata:
        if not isinstance(key, str):
            raise PayloadError(
                f"transaction {transaction.id!r} cannot be sent: a key of its metadata is of type "
                f"{type(key).__name__}; metadata keys must be strings"
            )
        if is_credential(key):
            raise PayloadError(
                f"transaction {transaction.id!r} cannot be sent: {key!r} in its metadata names a credential; "
                "transactions never carry any, so leave it out and give it to the consumer as a service"
            )


def _refusal(transaction: Transaction) -> PayloadError:
    for field in ("payload", "metadata"):
        culprit = _culprit(getattr(transaction, field))
        if culprit is not None:
            return PayloadError(
                f"transaction {transaction.id!r} cannot be sent: its {field} holds {culprit}, which would "
                "not come back equal; "
                "convert it to str/int/float/bool/None/bytes/list/dict/UTC datetime first"
            )
    return PayloadError(
        f"transaction {transaction.id!r} cannot be sent: id, source, correlation_id and parent_id must be "
        "strings of valid text, and payload and metadata must not be nested hundreds of levels deep"
    )


def _culprit(value: Any) -> str | None:
    """Names the first thing in `value` that does not survive, by its type: values are nobody's business."""
    todo = [value]
    for _ in range(100_000):  # a list may contain itself
        if not todo:
            return None
        value = todo.pop()
        if type(value) is list:
            todo.extend(reversed(value))
        elif isinstance(value, dict):
            todo.extend(value.values())
            todo.extend(value)
        elif not _survives(value):
            return f"a value of type {type(value).__name__}{_FLAWS.get(type(value), '')}"
    return None


def _survives(value: Any) -> bool:
    try:
        return bool(msgspec.msgpack.decode(msgspec.msgpack.encode(value)) == value)
    except Exception:  # noqa: BLE001 - objects in a payload run code of their own
        return False
