"""From the payload that came to the payload that the handler understands.

An event of an older schema version goes through the contract's upcasters, one version at a time, and then
into the contract's model. What cannot be brought to the current version is refused, never passed through: a
handler that gets a payload it does not know does something, and nobody notices.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from onceward.inbox.event import Event
from onceward.inbox.exceptions import Breach, ContractError

if TYPE_CHECKING:
    from onceward.inbox.contract import Contract

_MOST_PROBLEMS = 10
"""Named in one message; the rest is counted."""

_AT = re.compile(r" - at `((?:key in )?\$[^`]*)`$")
"""How msgspec ends a message: with a path of field names, where keys that are data show as `[...]`."""
_QUOTED = re.compile(r"(Invalid (?:enum )?value) .*", re.DOTALL)
"""Where msgspec quotes what it found."""


def check_type(contract: Contract, event: Event) -> None:
    """Refuses an event of a type that the contract does not name."""
    if contract.accepts(event.event_type):
        return
    found = f"is of type {event.event_type!r}" if event.event_type else "has no event_type"
    raise ContractError(
        f"event {event.tracking_id!r} {found}; consumer {contract.consumer_id!r} takes "
        f"{', '.join(contract.event_types)}",
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
    if _is_pydantic(model) and payload is event.payload:
        payload = _copied(contract, event)  # a validator may change its input in place
    cause: Exception | None = None
    try:
        return _validated(model, payload)
    except msgspec.ValidationError as error:
        problem = _told_by_msgspec(error)
    except Exception as error:  # noqa: BLE001 - a model's validators are anybody's code
        problem = _told_by_pydantic(error, model)
        if not problem:
            problem, cause = f"its code raised {type(error).__name__}", error
    # Outside the handler, and without a cause that quotes what it found.
    raise ContractError(
        f"event {event.tracking_id!r}: its payload does not fit {model.__qualname__} of consumer "
        f"{contract.consumer_id!r}: {problem}",
        Breach.PAYLOAD,
        event.tracking_id,
        cause,
    )


def _validated(model: Any, payload: Any) -> Any:
    if not _is_pydantic(model):
        return msgspec.convert(payload, model)
    if hasattr(model, "model_validate"):
        return model.model_validate(payload)
    from pydantic import TypeAdapter  # a pydantic dataclass, so it is loaded already

    return TypeAdapter(model).validate_python(payload)


def _told_by_msgspec(error: msgspec.ValidationError) -> str:
    """What is wrong and where, without what was found there."""
    text = str(error)
    at = _AT.search(text)
    where = at[1] if at else "$"
    if error.__cause__ is not None:  # raised by the model's __post_init__, in its words
        return f"{where}: its code raised {type(error.__cause__).__name__}"
    what = text[: at.start()] if at else text
    return f"{where}: " + _QUOTED.sub(r"\1", what)


def _told_by_pydantic(error: Exception, model: type) -> str:
    """What is wrong and where, without what was found there; empty if this is not a validation's result.

    By pydantic's names for errors: its texts may quote the input, and those of validators are anybody's.
    """
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return ""
    names = _field_names(model)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    told = [f"{_path(problem['loc'], names)}: {problem['type']}" for problem in found[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        told.append(f"and {len(found) - _MOST_PROBLEMS} more")
    return ", ".join(told)


def _path(location: Iterable[int | str], names: set[str]) -> str:
    """As msgspec writes it. Only names of fields are shown: the keys of a dict are data."""
    return "$" + "".join(f".{part}" if part in names else "[...]" for part in location)


def _field_names(model: type) -> set[str]:
    names: set[str] = set()
    for part in _models_in(model):
        names.update(_hints(part))
        for field in _pydantic_fields(part).values():
            names.update(alias for alias in (field.alias, field.validation_alias) if isinstance(alias, str))
    return names


# ───────────────────────────── which models there are ─────────────────────────────


def is_model(thing: object) -> TypeGuard[type]:
    """Whether this is a class that a payload can be converted into."""
    if not isinstance(thing, type):
        return False
    return (
        _is_pydantic(thing)
        or issubclass(thing, msgspec.Struct)
        or dataclasses.is_dataclass(thing)
        # By its marks, since `typing_extensions` has a TypedDict of its own.
        or (issubclass(thing, dict) and hasattr(thing, "__required_keys__"))
    )


def forbidding(model: type) -> type | None:
    """The first class in a model, or among its fields, that refuses unknown fields."""
    return next((part for part in _models_in(model) if _forbids(part)), None)


def _forbids(model: Any) -> bool:
    if issubclass(model, msgspec.Struct):
        return bool(model.__struct_config__.forbid_unknown_fields)
    # pydantic keeps it in one place for its models and in another for dataclasses and TypedDicts
    config = getattr(model, "model_config", None) or getattr(model, "__pydantic_config__", None) or {}
    return bool(config.get("extra") == "forbid")


def _is_pydantic(model: type) -> bool:
    # By a mark, so that pydantic is not loaded for those who do without it.
    return hasattr(model, "__pydantic_validator__")


def _pydantic_fields(model: Any) -> dict[str, Any]:
    if not _is_pydantic(model):
        return {}
    # A dataclass has only the second.
    return dict(model.model_fields if hasattr(model, "model_fields") else model.__pydantic_fields__)


def _models_in(model: type) -> list[type]:
    """The model and those that its fields are made of, at any depth."""
    found: list[type] = []
    todo: list[Any] = [model]
    while todo:
        part = todo.pop()
        if is_model(part):
            if part not in found:
                found.append(part)
                todo.extend(_hints(part).values())
            continue
        origin = typing.get_origin(part)
        todo.extend(typing.get_args(part) if origin is None else (origin, *typing.get_args(part)))
    return found


def _hints(model: Any) -> dict[str, Any]:
    if _is_pydantic(model):
        return {name: field.annotation for name, field in _pydantic_fields(model).items()}
    try:
        return typing.get_type_hints(model, include_extras=True)
    except Exception:  # noqa: BLE001 - a name that is not there yet; the model itself still counts
        return {}
