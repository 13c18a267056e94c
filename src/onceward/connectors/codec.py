"""Transactions as bytes: MessagePack, the same on every wire that has no format of its own.

A body is an array `[1, id, payload, metadata, created_at, source, correlation_id, parent_id]`. The leading
number is the format version. Later versions may append fields, which this one ignores. Metadata carries
system context and trace context, never a credential.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.context import get_current
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from onceward.errors import OncewardError
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.safety import report_failure
from onceward.transaction import ReadOnlyDict, Transaction

__all__ = ["DecodeError", "PayloadError", "decode", "decode_all", "encode", "encode_all", "sanitize_metadata"]

_log = OwnLogger(logging.getLogger("onceward.connectors.metadata"))
_propagator = TraceContextTextMapPropagator()

CREDENTIAL_KEYS = frozenset(
    {
        "authorization",
        "proxy-authorization",
        "cookie",
        "set-cookie",
        "password",
        "passwd",
        "secret",
        "api-key",
        "api_key",
        "x-api-key",
        "access_token",
        "refresh_token",
        "private_key",
    }
)
"""Lowercase names under which systems are known to keep credentials."""

# https://www.w3.org/TR/trace-context/: only version 00 ends here; later versions may continue after a dash.
_TRACEPARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)


class PayloadError(OncewardError, ValueError):
    """A transaction holds a value that would not come back equal from a wire. Nothing was sent."""


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
"""What can be wrong with a value of a supported type."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)
_NO_METADATA = ReadOnlyDict()
_metadata_of = attrgetter("metadata")


def encode(transaction: Transaction) -> bytes:
    """Encode a transaction, with the current trace context in its metadata.

    Raises `PayloadError` for anything that `decode` would not return equal.
    """
    return encode_with(current_trace_context(), transaction)


def encode_all(transactions: Iterable[Transaction]) -> list[bytes]:
    """`encode` each, looking up the trace context only once."""
    return list(map(partial(encode_with, current_trace_context()), transactions))


def decode(body: bytes) -> Transaction:
    """Decode a transaction, and sanitize its metadata. Raises `DecodeError` for anything else."""
    try:
        return _transaction(_decoder.decode(body))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # The reasons name types and positions in the body, never its values.
        raise DecodeError(f"{len(body)} bytes that are not a transaction: {error}") from None


def decode_all(bodies: Iterable[bytes]) -> list[Transaction]:
    """`decode` each. Raises `DecodeError` if it would for any of them."""
    nothing = _NO_METADATA
    try:
        wires = list(map(_decoder.decode, bodies))
        if any(map(_metadata_of, wires)):
            return list(map(_transaction, wires))
        return [  # as `_transaction`, without its calls
            Transaction(
                wire.id,
                wire.payload,
                nothing,
                wire.created_at,
                wire.source,
                wire.correlation_id,
                wire.parent_id,
            )
            for wire in wires
        ]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DecodeError(f"one of these is not a transaction: {error}") from None


def _transaction(wire: _Body) -> Transaction:
    metadata = _NO_METADATA
    if wire.metadata:
        metadata = ReadOnlyDict(wire.metadata)
        for key in metadata:
            if (
                not isinstance(key, str)
                or key.lower() in CREDENTIAL_KEYS
                or (key == "traceparent" and not _is_traceparent(metadata[key]))
            ):  # not `_is_welcome`: it would take half of the time
                metadata = ReadOnlyDict(sanitize_metadata(metadata))
                break
    return Transaction(
        wire.id,
        wire.payload,
        metadata,
        wire.created_at,
        wire.source,
        wire.correlation_id,
        wire.parent_id,
    )


def encode_with(trace_context: Mapping[str, str], transaction: Transaction) -> bytes:
    """`encode` with this trace context, for callers that encode many."""
    if type(transaction) is not Transaction:
        # A subclass may have fields that this format does not carry.
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


def sanitize_metadata(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the part of incoming metadata that a transaction may carry.

    Drops keys that are not strings, keys that name a credential, and an invalid `traceparent`. Logs the names
    of dropped keys, never their values.
    """
    refused = [key for key, value in metadata.items() if not _is_welcome(key, value)]
    if refused:
        _log.warning("dropped metadata on arrival: %s", ", ".join(f"{key!r:.100}" for key in refused))
    return {key: value for key, value in metadata.items() if _is_welcome(key, value)}


def is_credential(key: str) -> bool:
    return key.lower() in CREDENTIAL_KEYS


def current_trace_context() -> dict[str, str]:
    """Return the W3C headers of the current span; empty if there is none, or it cannot be read."""
    try:
        if not get_current():  # asked for a span, it asks three more functions
            return {}
        return _read_trace_context()
    except Exception as error:  # noqa: BLE001  as in `quietly`, which is two calls for every message
        report_failure("current_trace_context", error)
        return {}


def _read_trace_context() -> dict[str, str]:
    carrier: dict[str, str] = {}
    span = trace.get_current_span()
    if span is not trace.INVALID_SPAN and span.get_span_context().is_valid:
        _propagator.inject(carrier)
    return carrier


def with_trace_context(metadata: Mapping[str, Any], trace_context: Mapping[str, str]) -> dict[str, Any]:
    """Return `metadata` with its own trace context, if any, replaced as a whole by `trace_context`."""
    merged = {**metadata, **trace_context}
    if "tracestate" not in trace_context:
        merged.pop("tracestate", None)  # it belonged to the replaced trace
    return merged


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
                "transactions never carry credentials, so remove it and give it to the consumer as a service"
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
    """Describe the first part of `value` that would not come back equal, by its type: values are never shown."""
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


def _is_welcome(key: Any, value: Any) -> bool:
    if not isinstance(key, str) or is_credential(key):
        return False
    return key != "traceparent" or _is_traceparent(value)


def _is_traceparent(value: Any) -> bool:
    match = _TRACEPARENT.fullmatch(value) if isinstance(value, str) else None
    return match is not None and not (match["version"] == "00" and match["more"])
