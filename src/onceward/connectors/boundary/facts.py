"""Facts as transactions, and transactions as facts.

transaction                          fact and envelope
id                                   message_id
payload                              {"subject": …, "predicate": …, "object": …}, the complete fact
created_at                           produced_at_unix_ms: truncated to milliseconds
correlation_id, parent_id            correlation_id, causation_id
metadata                             labels, which are strings; `sequence` and `schema_version` come back as integers
metadata object_schema, …_media_type the fields with that name
metadata event_type, aggregate_id    predicate and subject: set on arrival, not sent
metadata offset, from_zone, to_zone  set on arrival, not sent; so is source, which is from_zone
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from onceward.boundary.canonical import canonical
from onceward.boundary.errors import InvalidArgument
from onceward.boundary.model import Envelope, Fact, StoredFact, check_append, fact_of
from onceward.connectors.codec import (
    PayloadError,
    encode_with,
    is_credential,
    sanitize_metadata,
    with_trace_context,
)
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Transaction

_log = OwnLogger(logging.getLogger("onceward.connectors.boundary_facts"))

PARTS = {"subject", "predicate", "object"}
OF_THE_FACT = {"event_type": "predicate", "aggregate_id": "subject"}
OF_THE_LOG = ("offset", "from_zone", "to_zone")
OF_THE_ENVELOPE = ("object_media_type", "object_schema")
WHOLE_NUMBERS = ("sequence", "schema_version")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


# ── on arrival ──────────────────────────────────────────────────────────────────────────────────────────


def as_transaction(stored: StoredFact) -> Transaction:
    """Convert a fact for the engine and the inbox: to the same transaction whenever it is fetched."""
    envelope, fact = stored.envelope, stored.fact
    metadata: dict[str, Any] = dict(envelope.labels)
    for name in WHOLE_NUMBERS:
        if metadata.get(name, "").isdecimal():
            metadata[name] = int(metadata[name])
    for name in OF_THE_ENVELOPE:
        if value := getattr(envelope, name):
            metadata[name] = value
    metadata.update({name: getattr(fact, part) for name, part in OF_THE_FACT.items()})
    metadata.update(offset=stored.offset, from_zone=envelope.from_zone, to_zone=envelope.to_zone)
    return Transaction(
        id=envelope.message_id,
        payload={"subject": fact.subject, "predicate": fact.predicate, "object": fact.object},
        metadata=sanitize_metadata(metadata),
        created_at=_EPOCH + envelope.produced_at_unix_ms * _MS,
        source=envelope.from_zone,
        correlation_id=envelope.correlation_id or None,
        parent_id=envelope.causation_id or None,
    )


def as_body(stored: StoredFact) -> bytes:
    """Encode a fact as a transaction; or the fact itself if it cannot become one, so it can be buried as it is."""
    try:
        return encode_with({}, as_transaction(stored))
    except (ValueError, OverflowError, RecursionError) as error:
        _log.error(
            "fact %s at offset %d cannot be converted to a transaction, and holds the cursor: %s",
            stored.message_id,
            stored.offset,
            error,
        )
        return msgspec.json.encode(stored)


# ── on its way ──────────────────────────────────────────────────────────────────────────────────────────


def as_fact(
    transaction: Transaction, zones: tuple[str, str], trace_context: Mapping[str, str]
) -> tuple[Envelope, Fact]:
    """Convert a transaction for appending. Raise `PayloadError` if the boundary would refuse it, or would not return it
    unchanged."""
    payload = transaction.payload
    if not isinstance(payload, dict) or payload.keys() != PARTS:
        raise _refusal(transaction, "its payload must have subject, predicate and object, and nothing else")
    metadata = with_trace_context(transaction.metadata, trace_context)
    envelope = Envelope(
        message_id=transaction.id,
        from_zone=zones[0],
        to_zone=zones[1],
        produced_at_unix_ms=(transaction.created_at - _EPOCH) // _MS,
        correlation_id=transaction.correlation_id or "",
        causation_id=transaction.parent_id or "",
        **{name: metadata.pop(name, "") for name in OF_THE_ENVELOPE},
        labels=_labels(transaction, metadata),
    )
    fact = _fact(transaction)
    try:
        check_append(envelope, fact)
    except (InvalidArgument, TypeError) as error:
        raise _refusal(transaction, str(error)) from None
    return envelope, fact


def _fact(transaction: Transaction) -> Fact:
    payload = transaction.payload
    try:
        fact = fact_of(payload["subject"], payload["predicate"], payload["object"])
        canonical(fact.object_json)
        same = fact.object == payload["object"]
    except Exception as error:  # noqa: BLE001 - objects in a payload run code of their own
        problem = str(error)
    else:
        if same:
            return fact
        problem = "it would come back changed"
    # Outside the handler: the first error may quote the payload.
    raise _refusal(transaction, f"its object cannot be stored as JSON: {problem}")


def _labels(transaction: Transaction, metadata: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for name, value in metadata.items():
        if name in OF_THE_FACT:
            if value != transaction.payload[OF_THE_FACT[name]]:
                part = OF_THE_FACT[name]
                raise _refusal(
                    transaction,
                    f"{name} in its metadata is not its {part}; leave it out, it is set on arrival",
                )
        elif name in OF_THE_LOG:
            continue
        elif is_credential(name):
            raise _refusal(
                transaction, f"{name!r} in its metadata names a credential; transactions must not carry any"
            )
        elif name in WHOLE_NUMBERS and type(value) is int and value >= 0:
            labels[name] = str(value)
        elif isinstance(value, str):
            labels[name] = value
        else:
            raise _refusal(
                transaction,
                f"{name!r} in its metadata is of type {type(value).__name__}; labels must be strings",
            )
    return labels


def _refusal(transaction: Transaction, problem: str) -> PayloadError:
    return PayloadError(f"transaction {transaction.id!r} cannot be appended: {problem}")
