"""Payloads in models: pydantic, msgspec, dataclasses and TypedDicts; what is wrong, without what was found there."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeGuard

import msgspec

_MOST_PROBLEMS = 10
"""Named in one message; the rest is counted."""

_AT = re.compile(r" - at `((?:key in )?\$[^`]*)`$")
"""How msgspec ends a message: with a path of field names, where keys that are data show as `[...]`."""
_QUOTED = re.compile(r"(Invalid (?:enum )?value) .*", re.DOTALL)
"""Where msgspec quotes what it found."""

_OF_THE_MODEL = {
    "missing", "extra_forbidden", "literal_error", "enum", "greater_than", "greater_than_equal", "less_than",
    "less_than_equal", "string_too_short", "string_too_long", "string_pattern_mismatch", "int_parsing", "float_parsing",
    "bool_parsing", "decimal_parsing",
}  # fmt: skip
"""Errors of pydantic whose text says what the model wants, and nothing of what was found."""


def fitted(
    model: Any, payload: Any, validate: Callable[[Any], Any] | None = None
) -> tuple[Any, str | None, Exception | None]:
    """The payload in the model; or None, what is wrong with it, and what the model's own code raised.

    `validate` is what `validator` has made of the model, for who does not want to have it made each time.
    """
    try:
        return (validate or validator(model))(payload), None, None
    except msgspec.ValidationError as error:
        return None, _told_by_msgspec(error), None
    except Exception as error:  # noqa: BLE001 - a model's validators are anybody's code
        problem = _told_by_pydantic(error, model)
        return (None, problem, None) if problem else (None, f"its code raised {type(error).__name__}", error)


def validator(model: Any) -> Callable[[Any], Any]:
    """What makes the model of a payload, or raises."""
    if not contains_pydantic(model):
        return partial(msgspec.convert, type=model)
    if hasattr(model, "model_validate"):
        made: Callable[[Any], Any] = model.model_validate
        return made
    from pydantic import TypeAdapter  # a pydantic dataclass, or list[Order], so it is loaded already

    return TypeAdapter(model).validate_python


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

    In pydantic's words where they are of the model alone: others may quote the input, or are of anybody's code.
    """
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return ""
    names = _field_names(model)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    told = [f"{_path(problem['loc'], names)}: {_words(problem)}" for problem in found[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        told.append(f"and {len(found) - _MOST_PROBLEMS} more")
    return ", ".join(told)


def _words(problem: Any) -> str:
    kind: str = problem["type"]
    return str(problem["msg"]) if kind in _OF_THE_MODEL or kind.endswith("_type") else kind


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
        is_pydantic(thing)
        or issubclass(thing, msgspec.Struct)
        or dataclasses.is_dataclass(thing)
        or is_typed_dict(thing)
    )


def is_typed_dict(thing: object) -> bool:
    # By its marks, since `typing_extensions` has a TypedDict of its own.
    return isinstance(thing, type) and issubclass(thing, dict) and hasattr(thing, "__required_keys__")


def forbidding(model: type) -> type | None:
    """The first class in a model, or among its fields, that refuses unknown fields."""
    return next((part for part in _models_in(model) if _forbids(part)), None)


def _forbids(model: Any) -> bool:
    if issubclass(model, msgspec.Struct):
        return bool(model.__struct_config__.forbid_unknown_fields)
    # pydantic keeps it in one place for its models and in another for dataclasses and TypedDicts
    config = getattr(model, "model_config", None) or getattr(model, "__pydantic_config__", None) or {}
    return bool(config.get("extra") == "forbid")


def is_pydantic(model: type) -> bool:
    # By a mark, so that pydantic is not loaded for those who do without it.
    return hasattr(model, "__pydantic_validator__")


def contains_pydantic(model: Any) -> bool:
    """Whether pydantic has to make it: one of its models, or `list[Order]` and the like with one inside."""
    if isinstance(model, type) and not hasattr(model, "__origin__"):
        return is_pydantic(model)
    return any(map(is_pydantic, _models_in(model)))


def _pydantic_fields(model: Any) -> dict[str, Any]:
    if not is_pydantic(model):
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
    if is_pydantic(model):
        return {name: field.annotation for name, field in _pydantic_fields(model).items()}
    try:
        return typing.get_type_hints(model, include_extras=True)
    except Exception:  # noqa: BLE001 - a name that is not there yet; the model itself still counts
        return {}
