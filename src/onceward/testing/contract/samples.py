"""Events for a verification, and the forms in which the same event may come one day."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from onceward.errors import ConfigurationError
from onceward.inbox import Contract, Event
from onceward.inbox.errors import ContractError
from onceward.transaction import Transaction

UNKNOWN = "onceward_unknown_field"
"""What a producer adds tomorrow."""
_HEAD = ("event_type", "aggregate_id", "sequence", "schema_version", "lock_token")


def as_transactions(given: Any, contract: Contract) -> tuple[Transaction, ...]:
    """Transactions, events, or dicts as they are in a JSONL file: one event each."""
    if callable(given):
        given = given()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ConfigurationError(f"events are a list, not {type(given).__name__}")
    return tuple(_as_transaction(each, number, contract) for number, each in enumerate(given))


def _as_transaction(thing: Any, number: int, contract: Contract) -> Transaction:
    if isinstance(thing, Transaction):
        return thing
    try:
        if isinstance(thing, Mapping):
            return _of_mapping(thing, number, contract)
        return _of_event(Event.of(thing))
    except (ContractError, TypeError, ValueError) as error:
        raise ConfigurationError(f"event {number + 1}: {error}") from None


def _of_mapping(given: Mapping[str, Any], number: int, contract: Contract) -> Transaction:
    """An envelope with `payload`, or a payload with the event's fields among its own."""
    if "payload" not in given:
        given = {"payload": given, **{name: given[name] for name in ("tracking_id", *_HEAD) if name in given}}
    head = {**given.get("metadata", {}), **{name: given[name] for name in _HEAD if name in given}}
    body = given["payload"]
    in_body = isinstance(body, Mapping) and "event_type" in body
    if "event_type" not in head and not in_body and contract.event_types[0] != "*":
        head["event_type"] = contract.event_types[0]
    made: dict[str, Any] = {"payload": body, "metadata": head}
    made["id"] = str(given.get("tracking_id", given.get("id", f"event-{number + 1}")))
    if "created_at" in given:
        made["created_at"] = msgspec.convert(given["created_at"], type=datetime, strict=False)
    return Transaction(**made)


def _of_event(event: Event) -> Transaction:
    head = {name: getattr(event, name) for name in _HEAD if getattr(event, name) is not None}
    return Transaction(
        id=event.tracking_id, payload=event.payload, metadata=head, created_at=event.created_at
    )


def with_payload(transaction: Transaction, payload: Any) -> Transaction:
    """The same event with another payload: not `derive`, which makes another event."""
    return msgspec.structs.replace(transaction, payload=payload)


# ── forms of an event ───────────────────────────────────────────────────────────────────────────────────


def with_unknown_fields(transaction: Transaction) -> Transaction | None:
    """With a field nobody knows; None if the payload has no fields.

    Only at the top: an inner dict may be a table of data, where another key means another thing.
    """
    if not isinstance(transaction.payload, Mapping):
        return None
    return with_payload(transaction, {**transaction.payload, UNKNOWN: {"anything": [1, "two", None]}})


def without(transaction: Transaction, field: str) -> Transaction | None:
    """Without one field; None if it is not there."""
    payload = transaction.payload
    if not isinstance(payload, Mapping) or field not in payload:
        return None
    return with_payload(transaction, {key: value for key, value in payload.items() if key != field})


def optional_fields(model: Any) -> list[str]:
    """The fields of a contract's model that have a default, by the name they have in a payload."""
    if model is None:
        return []
    if hasattr(model, "__pydantic_fields__"):
        fields = model.__pydantic_fields__
        return [field.alias or name for name, field in fields.items() if not field.is_required()]
    if issubclass(model, msgspec.Struct):
        return [field.encode_name for field in msgspec.structs.fields(model) if not field.required]
    if dataclasses.is_dataclass(model):
        missing = dataclasses.MISSING
        return [
            field.name
            for field in dataclasses.fields(model)
            if field.default is not missing or field.default_factory is not missing
        ]
    return sorted(getattr(model, "__optional_keys__", ()))
