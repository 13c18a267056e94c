"""From the payload that came to the payload that the handler understands.

An event of an older schema version goes through the contract's upcasters, one version at a time, and then
into the contract's model. What cannot be brought to the current version is refused, never passed through: a
handler that gets a payload it does not know does something, and nobody notices.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from onceward.inbox.errors import Breach, ContractError
from onceward.inbox.event import Event
from onceward.models import convert_payload, is_pydantic

if TYPE_CHECKING:
    from onceward.inbox.contract import Contract


def check_type(contract: Contract, event: Event) -> None:
    """Refuses an event of a type that the contract does not name."""
    if contract.accepts(event.event_type):
        return
    takes = f"consumer {contract.consumer_id!r} takes {', '.join(contract.event_types)}"
    if event.event_type:
        problem = f"is of type {event.event_type!r}; {takes}"
    else:
        problem = f"has no event_type in its metadata; {takes}, and one that takes all says event_types=['*']"
    raise ContractError(
        f"event {event.tracking_id!r} {problem}",
        Breach.EVENT_TYPE,
        event.tracking_id,
    )


def upcast(contract: Contract, event: Event) -> Event:
    """The event as the handler gets it: with a payload of the contract's schema version, and its model.

    The event that was given stays as it is, and so does its digest: that is taken of what was sent. A new
    event's digest is another.
    """
    payload = event.payload
    if event.schema_version != contract.schema_version:
        payload = _up_the_chain(contract, event)
    if contract.model is not None:
        payload = _in_model(contract, event, payload)
    elif event.schema_version == contract.schema_version:
        return event
    return msgspec.structs.replace(event, payload=payload, schema_version=contract.schema_version)


# ───────────────────────────── the chain ─────────────────────────────


def _up_the_chain(contract: Contract, event: Event) -> Any:
    _check_version(contract, event)
    payload = _copied(contract, event)
    for version in range(event.schema_version, contract.schema_version):
        payload = _step(contract, event, version, payload)
    return payload


def _check_version(contract: Contract, event: Event) -> None:
    found = f"event {event.tracking_id!r} has schema version {event.schema_version}"
    if event.schema_version > contract.schema_version:
        raise ContractError(
            f"{found}, and consumer {contract.consumer_id!r} knows {contract.schema_version} at most; deploy the "
            "consumer before the producer, then redrive",
            Breach.SCHEMA,
            event.tracking_id,
        )
    if event.schema_version < contract.oldest_version:
        raise ContractError(
            f"{found}, and consumer {contract.consumer_id!r} has no upcaster from {event.schema_version} to "
            f"{event.schema_version + 1}: it goes back to {contract.oldest_version} only; add what is missing, "
            "then redrive",
            Breach.SCHEMA,
            event.tracking_id,
        )


def _copied(contract: Contract, event: Event) -> Any:
    """The payload for code that may change it in place. What was sent must stay: its digest is compared."""
    try:
        return copy.deepcopy(event.payload)
    except Exception as error:  # noqa: BLE001 - objects in a payload run code of their own
        problem = type(error).__name__
    raise ContractError(
        f"event {event.tracking_id!r}: its payload cannot be copied ({problem}), so consumer "
        f"{contract.consumer_id!r} cannot convert it; send plain data",
        Breach.PAYLOAD,
        event.tracking_id,
    )


def _step(contract: Contract, event: Event, version: int, payload: Any) -> Any:
    upcaster = contract.upcasters[version]
    try:
        result = upcaster(payload)
    except Exception as error:
        raise _failed_step(contract, event, version, f"raised {type(error).__name__}") from error
    if result is None and payload is not None:
        # Changed in place and not returned: an easy mistake, which would lose the whole payload.
        raise _failed_step(contract, event, version, "returned None; it must return the payload")
    if isinstance(result, Mapping) and "schema_version" in result:
        return {**result, "schema_version": version + 1}
    return result


def _failed_step(contract: Contract, event: Event, version: int, problem: str) -> ContractError:
    return ContractError(
        f"event {event.tracking_id!r}: the upcaster from {version} to {version + 1} of consumer "
        f"{contract.consumer_id!r} {problem}",
        Breach.SCHEMA,
        event.tracking_id,
    )


# ───────────────────────────── the model ─────────────────────────────


def _in_model(contract: Contract, event: Event, payload: Any) -> Any:
    model: Any = contract.model
    if is_pydantic(model) and payload is event.payload:
        payload = _copied(contract, event)  # a validator may change its input in place
    value, problem, cause = convert_payload(model, payload)
    if problem is None:
        return value
    # Outside the handler, and without a cause that quotes what it found.
    raise ContractError(
        f"event {event.tracking_id!r}: its payload does not fit {model.__qualname__} of consumer "
        f"{contract.consumer_id!r}: {problem}",
        Breach.PAYLOAD,
        event.tracking_id,
        cause,
    )
