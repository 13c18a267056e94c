"""Converts the payload that arrived into the payload that the handler understands.

An event of an older schema version goes through the contract's upcasters, one version at a time, and then into the
contract's model. A payload that cannot be converted is refused, never passed through: a handler would silently do the
wrong thing with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from onceward._functions import explain_unrun, has_run
from onceward.inbox.errors import Breach, ContractError
from onceward.inbox.event import Event
from onceward.models import convert_payload, is_pydantic

if TYPE_CHECKING:
    from onceward.inbox.contract import Contract


def check_type(contract: Contract, event: Event) -> None:
    """Raise `ContractError` if the contract does not accept the event's type."""
    if contract.accepts(event.event_type):
        return
    accepts = f"consumer {contract.consumer_id!r} accepts {', '.join(contract.event_types)}"
    if event.event_type:
        problem = f"is of type {event.event_type!r}; {accepts}"
    else:
        problem = f"has no event_type in its metadata; {accepts} (event_types=['*'] would accept every event)"
    raise ContractError(
        f"event {event.tracking_id!r} {problem}",
        Breach.EVENT_TYPE,
        event.tracking_id,
    )


def upcast(contract: Contract, event: Event) -> Event:
    """Return the event for the handler: its payload has the contract's schema version and model.

    The given event stays unchanged, and so does its digest, which covers what was sent. The new event has another
    digest.
    """
    payload = event.payload
    if event.schema_version != contract.schema_version:
        payload = _run_chain(contract, event)
    if contract.model is not None:
        payload = _convert_to_model(contract, event, payload)
    elif event.schema_version == contract.schema_version:
        return event
    changed: Event = event.__copy__()  # type: ignore[attr-defined]  # not `replace`, which would check all fields
    msgspec.structs.force_setattr(changed, "payload", payload)
    msgspec.structs.force_setattr(changed, "schema_version", contract.schema_version)
    return changed


# ───────────────────────────── the chain ─────────────────────────────


def _run_chain(contract: Contract, event: Event) -> Any:
    _check_version(contract, event)
    payload = _copy_payload(contract, event)
    for version in range(event.schema_version, contract.schema_version):
        payload = _step(contract, event, version, payload)
    return payload


def _check_version(contract: Contract, event: Event) -> None:
    found = f"event {event.tracking_id!r} has schema version {event.schema_version}"
    if event.schema_version > contract.schema_version:
        raise ContractError(
            f"{found}, but consumer {contract.consumer_id!r} supports at most {contract.schema_version}; deploy the "
            "consumer before the producer, then redrive",
            Breach.SCHEMA,
            event.tracking_id,
        )
    if event.schema_version < contract.oldest_version:
        raise ContractError(
            f"{found}, but consumer {contract.consumer_id!r} has no upcaster from {event.schema_version} to "
            f"{event.schema_version + 1}: it goes back only to {contract.oldest_version}; add the missing ones, "
            "then redrive",
            Breach.SCHEMA,
            event.tracking_id,
        )


def _copy_payload(contract: Contract, event: Event) -> Any:
    """Copy the payload for code that may change it in place. The original must stay: its digest is compared."""
    try:
        return copy.deepcopy(event.payload)
    except Exception as error:  # noqa: BLE001 - objects in a payload run their own code
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
    if result is not None and not has_run(result):
        raise _failed_step(contract, event, version, explain_unrun(result))
    if result is None and payload is not None:
        # Changed in place and not returned: an easy mistake that would lose the whole payload.
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


_is_pydantic = lru_cache(maxsize=256)(is_pydantic)
"""Looking for an attribute that a class does not have takes long."""


def _convert_to_model(contract: Contract, event: Event, payload: Any) -> Any:
    model: Any = contract.model
    if payload is event.payload and _is_pydantic(model):
        payload = _copy_payload(contract, event)  # a validator may change its input in place
    value, problem, cause = convert_payload(model, payload)
    if problem is None:
        return value
    # Raised outside the except block, without a cause that quotes the payload.
    raise ContractError(
        f"event {event.tracking_id!r}: its payload does not fit {model.__qualname__} of consumer "
        f"{contract.consumer_id!r}: {problem}",
        Breach.PAYLOAD,
        event.tracking_id,
        cause,
    )
