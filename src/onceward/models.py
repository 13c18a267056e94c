"""Convert payloads to models: pydantic, msgspec, dataclasses and TypedDicts. Problems never quote the payload."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, TypeGuard

import msgspec

_MOST_PROBLEMS = 10
"""Listed in one message; the rest is counted."""

_WITHOUT_FIELDS = (str, int, float, bytes, list, tuple, set, frozenset)
"""Types of payloads, or of their fields."""

_AT = re.compile(r" - at `((?:key in )?\$[^`]*)`$")
"""The path at the end of msgspec's messages: field names; keys that are data appear as `[...]`."""
_QUOTED = re.compile(r"(Invalid (?:enum )?value) .*", re.DOTALL)
"""Messages of msgspec that quote the input."""

_SAFE_PROBLEMS = {
    "missing", "extra_forbidden", "literal_error", "enum", "greater_than", "greater_than_equal", "less_than",
    "less_than_equal", "string_too_short", "string_too_long", "string_pattern_mismatch", "int_parsing", "float_parsing",
    "bool_parsing", "decimal_parsing",
}  # fmt: skip
"""Errors of pydantic whose messages name only what the model expects, never the input."""


def convert_payload(
    model: Any, payload: Any, validate: Callable[[Any], Any] | None = None
) -> tuple[Any, str | None, Exception | None]:
    """Return the payload as the model, None, None; or None, the problem, and the error its validators raised, if any.

    Pass `validate`, the result of `validator(model)`, to build it only once.
    """
    try:
        return (validate or _cached_validator(model))(payload), None, None
    except msgspec.ValidationError as error:
        return None, _msgspec_problem(error), None
    except Exception as error:  # noqa: BLE001 - validators are user code
        problem = _pydantic_problem(error, model)
        return (None, problem, None) if problem else (None, f"its code raised {type(error).__name__}", error)


def validator(model: Any) -> Callable[[Any], Any]:
    """Return a function that converts a payload to the model, or raises."""
    if not contains_pydantic(model):
        return partial(msgspec.convert, type=model)
    if hasattr(model, "model_validate"):
        validate: Callable[[Any], Any] = model.model_validate
        return validate
    from pydantic import TypeAdapter  # for a pydantic dataclass or list[Order]; already loaded by the model

    return TypeAdapter(model).validate_python


_cached_validator = lru_cache(maxsize=256)(validator)


def _msgspec_problem(error: msgspec.ValidationError) -> str:
    """What is wrong and where, without the input."""
    text = str(error)
    at = _AT.search(text)
    where = at[1] if at else "$"
    if error.__cause__ is not None:  # raised by the model's __post_init__; its message may quote the input
        return f"{where}: its code raised {type(error.__cause__).__name__}"
    what = text[: at.start()] if at else text
    return f"{where}: " + _QUOTED.sub(r"\1", what)


def _pydantic_problem(error: Exception, model: type) -> str:
    """What is wrong and where, without the input; empty if this is not a ValidationError.

    Uses pydantic's messages only if they cannot quote the input; the messages of custom validators can.
    """
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return ""
    names = _field_names(model)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{_path(problem['loc'], names)}: {_message(problem)}" for problem in found[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        lines.append(f"and {len(found) - _MOST_PROBLEMS} more")
    return ", ".join(lines)


def _message(problem: Any) -> str:
    kind: str = problem["type"]
    return str(problem["msg"]) if kind in _SAFE_PROBLEMS or kind.endswith("_type") else kind


def _path(location: Iterable[int | str], names: set[str]) -> str:
    """Format a path as msgspec does. Shows only field names: the keys of a dict are data."""
    return "$" + "".join(f".{part}" if part in names else "[...]" for part in location)


def _field_names(model: type) -> set[str]:
    names: set[str] = set()
    for part in _models_in(model):
        names.update(_hints(part))
        for field in _pydantic_fields(part).values():
            names.update(alias for alias in (field.alias, field.validation_alias) if isinstance(alias, str))
    return names


def payload_names(model: type) -> dict[str, tuple[str, ...]]:
    """The fields of a model, and how each may be called in a payload. Empty if they are not known."""
    fields = _pydantic_fields(model)
    if fields:
        aliases = {name: (field.validation_alias, field.alias) for name, field in fields.items()}
        return {
            name: (*(each for each in found if isinstance(each, str)), name)
            for name, found in aliases.items()
        }
    if issubclass(model, msgspec.Struct):
        return {each.name: (each.encode_name,) for each in msgspec.structs.fields(model)}
    return {name: (name,) for name in _hints(model)}


def field_problem(model: Any, path: str, what: str = "its payload") -> str | None:
    """Why no payload of this type can have the field; None if one can, or if that is not known."""
    field, _, inside = path.partition(".")
    plain = typing.get_origin(model) or model
    if isinstance(plain, type) and issubclass(plain, _WITHOUT_FIELDS):
        return f"{what} is {plain.__name__}, which has no fields"
    known = payload_names(model) if is_model(model) else {}
    if not known:
        return None
    if field not in known and (what == "its payload" or not any(field in names for names in known.values())):
        return f"{model.__qualname__} has no such field; it has {', '.join(known)}"
    return field_problem(_hints(model).get(field), inside, repr(field)) if inside else None


def as_plain_data(payload: Any) -> Any:
    """Return it as plain data: models exist only in the functions at both ends.

    A set becomes a sorted list: its own order is another one in each process, and a copy must be equal.
    """
    if type(payload) is dict:
        try:  # most are plain already, and what has to be converted takes much longer
            plain = msgspec.to_builtins(payload)
            if plain == payload:
                return plain
        except TypeError:
            pass
    try:
        return msgspec.to_builtins(payload, enc_hook=_dump, order="deterministic")
    except TypeError:  # it cannot be sent, or has keys or a set that cannot be sorted
        return msgspec.to_builtins(payload, enc_hook=_dump)


def _dump(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return _with_sets_in_order(value.model_dump(mode="json"), value.model_dump())
    raise TypeError(f"{type(value).__qualname__} cannot be sent; a payload must be plain data or a model")


def _with_sets_in_order(plain: Any, dumped: Any) -> Any:
    """Sort the lists that pydantic has made of sets. `dumped` has the sets."""
    if isinstance(plain, dict) and isinstance(dumped, dict) and len(plain) == len(dumped):
        pairs = zip(plain.items(), dumped.values(), strict=True)
        return {key: _with_sets_in_order(value, other) for (key, value), other in pairs}
    if isinstance(plain, list):
        if isinstance(dumped, set | frozenset):
            try:
                return sorted(plain)
            except TypeError:
                return sorted(plain, key=msgspec.msgpack.encode)
        if isinstance(dumped, list | tuple) and len(plain) == len(dumped):
            return [*map(_with_sets_in_order, plain, dumped)]
    return plain


# ── inspecting models ───────────────────────────────────────────────────────────────────────────────────


def is_model(thing: object) -> TypeGuard[type]:
    """Whether a payload can be converted to this class."""
    if not isinstance(thing, type):
        return False
    return (
        is_pydantic(thing)
        or issubclass(thing, msgspec.Struct)
        or dataclasses.is_dataclass(thing)
        or is_typed_dict(thing)
    )


def is_typed_dict(thing: object) -> bool:
    # By its attributes: `typing_extensions` has its own TypedDict.
    return isinstance(thing, type) and issubclass(thing, dict) and hasattr(thing, "__required_keys__")


def forbidding(model: type) -> type | None:
    """The first class, of the model and its fields, that forbids unknown fields."""
    return next((part for part in _models_in(model) if _forbids(part)), None)


def _forbids(model: Any) -> bool:
    if issubclass(model, msgspec.Struct):
        return bool(model.__struct_config__.forbid_unknown_fields)
    # Models of pydantic have the first; its dataclasses and TypedDicts the second.
    config = getattr(model, "model_config", None) or getattr(model, "__pydantic_config__", None) or {}
    return bool(config.get("extra") == "forbid")


def is_pydantic(model: type) -> bool:
    # By an attribute, which does not import pydantic.
    return hasattr(model, "__pydantic_validator__")


def contains_pydantic(model: Any) -> bool:
    """Whether pydantic must convert it: its models, types and constraints, and types that contain one.

    Examples are `list[Order]`, and a dataclass with a field `total: PositiveInt`, whose constraint msgspec ignores.
    """
    return any(map(_is_of_pydantic, _parts_of(model)))


def ignores_pydantic(model: Any) -> bool:
    """Whether a Struct in it has constraints of pydantic, which msgspec does not check."""
    return any(map(_is_of_pydantic, _parts_of(model, into_structs=True))) and not contains_pydantic(model)


def _is_of_pydantic(part: Any) -> bool:
    if hasattr(part, "__pydantic_validator__") or hasattr(part, "__get_pydantic_core_schema__"):
        return True
    # The metadata of `Annotated`: pydantic's `PositiveInt` is `Annotated[int, annotated_types.Gt(0)]`.
    return type(part).__module__.partition(".")[0] in ("pydantic", "annotated_types")


def _pydantic_fields(model: Any) -> dict[str, Any]:
    if not is_pydantic(model):
        return {}
    # Dataclasses have only the second.
    return dict(model.model_fields if hasattr(model, "model_fields") else model.__pydantic_fields__)


def _models_in(model: type) -> list[type]:
    """The model, and the models in its fields, at any depth."""
    return [part for part in _parts_of(model, into_structs=True) if is_model(part)]


def _parts_of(model: Any, *, into_structs: bool = False) -> list[Any]:
    """The type, what it is made of, and the types of the fields of its models, at any depth.

    Fields of Structs are left out unless asked for: pydantic cannot convert to a Struct.
    """
    found: list[Any] = []
    todo: list[Any] = [model]
    while todo:
        part = todo.pop()
        if is_model(part):
            if part not in found:
                found.append(part)
                if into_structs or not issubclass(part, msgspec.Struct):
                    todo.extend(_hints(part).values())
            continue
        found.append(part)
        origin = typing.get_origin(part)
        todo.extend(typing.get_args(part) if origin is None else (origin, *typing.get_args(part)))
    return found


def _hints(model: Any) -> dict[str, Any]:
    if is_pydantic(model):
        return {name: field.annotation for name, field in _pydantic_fields(model).items()}
    try:
        return typing.get_type_hints(model, include_extras=True)
    except Exception:  # noqa: BLE001 - an unresolved forward reference; the model itself still counts
        return {}
