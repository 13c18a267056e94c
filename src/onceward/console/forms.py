"""What a form or an address says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from onceward.deadletters import Filter
from onceward.errors import ConfigurationError, NotFoundError

FIELDS = ("consumer", "event_type", "category", "status", "group", "text")
HIGHEST = (1 << 63) - 1
"""Number that a database can hold."""
LONGEST_TEXT = 5_000
"""Characters of a reason or a cause. The audit keeps it whole."""


def written(form: Mapping[str, Any], name: str) -> str:
    """Return what an operator wrote into a field. Raises ConfigurationError if it is too long; nothing is cut off."""
    text = str(form.get(name) or "").strip()
    if len(text) > LONGEST_TEXT:
        field = name.replace("_", " ")
        raise ConfigurationError(
            f"the {field} has {len(text):,} characters, and may have {LONGEST_TEXT:,}; nothing was changed"
        )
    return text


def filter_of(given: Mapping[str, Any]) -> Filter:
    """Read a filter from a form or a query."""
    fields: dict[str, Any] = {name: str(given[name]) for name in FIELDS if str(given.get(name) or "").strip()}
    try:
        if given.get("until"):
            fields["until"] = float(given["until"])
        if given.get("ids"):
            fields["ids"] = tuple(int(each) for each in str(given["ids"]).split(","))
    except ValueError:
        raise ConfigurationError("a filter's until is a number, and its ids are numbers") from None
    if any("\0" in value for value in fields.values() if isinstance(value, str)):
        raise ConfigurationError("a filter cannot have NUL characters")
    return Filter(**fields)


def number_of(given: str, what: str) -> int:
    """A whole number that a database can hold. `what` is the error, if it is not."""
    if not (given.isascii() and given.isdigit() and len(given) <= 18):
        raise ConfigurationError(what)
    return int(given)


def letter_of(request: Request) -> int:
    """The number of a letter in an address."""
    number = int(request.path_params["id"])
    if number > HIGHEST:
        raise NotFoundError(f"there is no dead letter {number}")
    return number


def form_of(wanted: Filter) -> dict[str, str]:
    """The fields of a form that select the same letters."""
    fields = {name: str(value) for name in FIELDS if (value := getattr(wanted, name)) is not None}
    if wanted.until is not None:
        fields["until"] = repr(wanted.until)
    if wanted.ids:
        fields["ids"] = ",".join(map(str, wanted.ids))
    return fields
