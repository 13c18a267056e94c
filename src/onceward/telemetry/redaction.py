"""Errors without the values they quote: SQL parameters, rows of a database, input of a validator, passwords.

Values of a failed statement are hidden where `BoundValues` finds them, all others by the words around them.

Their messages end up in logs, spans, dead letters and on terminals, where a card number must not be. What names a thing
stays: constraints, tables, columns, the statement. `scrub` changes the errors themselves, because handlers and
exporters of others render them, too; `redact` changes a text, for errors that build their message when asked for it.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from onceward._secrets import mask, mask_shown
from onceward.telemetry.bound_values import BoundValues, hide_literals

MOST = 1000
"""Errors of one tree, at most."""
DEEPEST = 3
"""Levels of lists and dicts that an error keeps."""
SHORTEST = 4
"""Characters of a detail that is looked for in other messages."""
MOST_SETS = 10
"""Sets of parameters of one statement that are looked for in other messages."""
HIDDEN = "[SQL parameters hidden due to hide_parameters=True]"
"""As SQLAlchemy writes it."""

LABELS = ("DETAIL:", "CONTEXT:", "QUERY:")
"""What PostgreSQL writes before what it says about rows."""

_SUSPICIOUS = re.compile(
    r"\[parameters: |\[SQL: |DETAIL:\s|CONTEXT:\s|QUERY:\s|LINE \d+: |Failing row|Key \("
    r'|input_value=|Invalid (?:enum )?value |invalid input |malformed |out of range|value "'
)
"""Something in nearly every text that holds a value. Most texts hold none, and are searched once."""
# A label that PostgreSQL or SQLAlchemy writes after a detail, or what a traceback continues with. The detail itself may
# have several lines. In the repr of an error, a line ends with a backslash and an n.
_BLANKS = r"(?:(?<!\s)(?<!\\n)(?:\\n|\s)+)?"
"""Begins where blanks do: trying every start of many takes minutes."""
_NEXT = (
    rf"(?={_BLANKS}(?:HINT: |LINE \d+: |\[SQL|\[parameters: |\(Background on |During handling of the above"
    r"|The above exception was|Traceback \(most recent|\+-)|\Z)"
)
_DETAIL = re.compile(rf"{_BLANKS}(?:(?<=\\n)|\b)(?:DETAIL|CONTEXT|QUERY):\s.*?{_NEXT}", re.DOTALL)
_PARAMETERS = re.compile(r"\[parameters: (?:.*\]|.*)")
_STATEMENT = re.compile(
    rf"\[SQL: .*?(?={_BLANKS}(?:\[SQL|\[parameters: |\(Background on )|\Z)|\bLINE \d+: [^\n]*", re.DOTALL
)
_ROW = re.compile(r"Failing row contains \(.*?(?:\)\.|\)\Z|\Z)", re.DOTALL)
_KEY = re.compile(r"(Key \([^)\n]*\))=\(.*?\)(?= (?:already|is not|is still|conflicts)|$)", re.DOTALL)
_QUOTED_INPUT = re.compile(
    r"""((?:\binvalid\ input\ (?:syntax|value)\ for|\bmalformed)[^:\n]*|\bout\ of\ range):\ "[^\n]*"
        |\bvalue\ "[^"\n]*"(?=\ is\ out\ of\ range)""",
    re.VERBOSE,
)
_PYDANTIC = re.compile(r"input_value=.*?(?=, input_type=|\])", re.DOTALL)
_MSGSPEC = re.compile(r"(Invalid (?:enum )?value) (?:'[^'\n]*'|\"[^\"\n]*\"|-?\d+)")
_MESSAGE_LINE = re.compile(r"(?m)^(?: *\| )?\S.*$")
"""A line of a traceback that is not about a place in the code."""
_IN_QUOTES = re.compile(
    r'(?<!column )(?<!relation )(?<!constraint )(?<!encoding )"[^"]*"|»[^«]*«|«[^»]*»|„[^“]*“'
)


def redact(text: str, about: BaseException | None = None) -> str:
    """Remove the values that messages of databases, SQLAlchemy and validators quote, and passwords of URLs; if the text
    is `about` an error, also the values of its statement."""
    text = mask(text)
    if about is not None:
        text = BoundValues(_tree(about)).hide(text)
    return _without_quotes(text)


def message_with_notes(error: BaseException | None) -> str:
    """What an error says, and what was added to it later, as a traceback has it."""
    notes = getattr(error, "__notes__", ())
    return "\n".join([str(error), *map(str, notes if isinstance(notes, (list, tuple)) else ())])


def redact_shown(text: str) -> str:
    """`redact` without the secrets that only this process knows: the same in every process, for texts that are
    compared."""
    return _without_quotes(mask_shown(text))


def _without_quotes(text: str) -> str:
    if _SUSPICIOUS.search(text) is None:
        return text
    if any(label in text for label in LABELS):
        text = _DETAIL.sub("", text)
    text = _STATEMENT.sub(lambda found: hide_literals(found[0]), text)
    text = _PARAMETERS.sub(HIDDEN, text)
    text = _ROW.sub("Failing row contains (…).", text)
    text = _KEY.sub(r"\1=(…)", text)
    text = _QUOTED_INPUT.sub(lambda found: f'{found[1]}: "…"' if found[1] else 'value "…"', text)
    text = _PYDANTIC.sub("input_value=…", text)
    return _MSGSPEC.sub(r"\1", text)


def scrub(error: BaseException | None) -> None:
    """Remove the values from the message of an error and of all that led to it, or that it contains."""
    if error is None:
        return
    errors = list(_tree(error))
    details = [detail for each in errors for detail in _details(each)]
    values = BoundValues(errors)
    for each in errors:
        with suppress(Exception):  # a class of the user that cannot be read or changed
            _scrub(each, details, values)


def redact_line(text: str) -> str:
    """Remove the values from a line of a log, which may quote the error that is being handled."""
    handled = sys.exception()
    if handled is not None:
        errors = list(_tree(handled))
        said = [_message_of(each) for each in errors]
        scrub(handled)
        for each, message in zip(errors, said, strict=True):
            if message and message in text:
                text = text.replace(message, _message_of(each))
    return redact(text)


def format_error(error: BaseException) -> str:
    """Format an error with its traceback, like `traceback.format_exception`."""
    scrub(error)
    text = redact("".join(traceback.format_exception(error))).rstrip("\n")
    values = BoundValues(_tree(error))  # of errors that build their message when asked for it
    return _MESSAGE_LINE.sub(lambda found: values.hide(found[0]), text) if values else text


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  of user code
        return ""


def _tree(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, the members of groups, and errors that it keeps or was made from."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting and len(seen) < MOST:
        each = waiting.pop()
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += (each.__cause__, each.__context__)
        with suppress(Exception):
            waiting += (*each.args, *vars(each).values(), *getattr(each, "exceptions", ()))


def _details(error: BaseException) -> list[str]:
    """Return what a wrapper may quote without its label: parameters, and what PostgreSQL says about rows, in any
    language."""
    found = list(_parameters(error))
    with suppress(Exception):
        diagnosis: Any = getattr(error, "diag", None)
        for text in (
            getattr(diagnosis, "message_detail", None),
            getattr(diagnosis, "context", None),
            getattr(error, "detail", None) if hasattr(error, "sqlstate") else None,  # asyncpg
        ):
            if isinstance(text, str) and len(text) >= SHORTEST:
                found += (text, repr(text)[1:-1])
    return found


def _parameters(error: BaseException) -> Iterator[str]:
    """Yield the parameters of a StatementError as Python shows them; of many sets the first ones."""
    given: Any = getattr(error, "params", None)
    if not given or not hasattr(error, "hide_parameters"):
        return
    sets = given[:MOST_SETS] if isinstance(given, list) else []
    for each in (*([given] if len(given) <= MOST_SETS or not sets else []), *sets):
        if isinstance(each, (Mapping, list, tuple)) and each:
            with suppress(Exception):  # values of the user
                text = repr(each)
                yield from (text, repr(text)[1:-1])


def _scrub(error: BaseException, details: list[str], values: BoundValues) -> None:
    changed: Any = error  # user code; what cannot be set raises
    attributes = vars(error)
    if "hide_parameters" in attributes:  # a StatementError of SQLAlchemy
        changed.hide_parameters = True
        if isinstance(changed.statement, str):
            changed.statement = hide_literals(changed.statement)
    args = tuple(_clean(each, details, values) for each in error.args)
    own = _own_message(error)
    if own is not None:
        args = (values.hide(own), *args[1:])
    if args != error.args:
        error.args = args
    for name, value in list(attributes.items()):
        if isinstance(value, (str, list, tuple, dict)) and name not in ("statement", "params"):
            clean = _clean(value, details, values)
            if clean != value:
                setattr(changed, name, clean)


def _own_message(error: BaseException) -> str | None:
    """Return the message of a PostgreSQL error without its details, in any language; None for other errors."""
    diagnosis: Any = getattr(error, "diag", None)
    primary = getattr(diagnosis, "message_primary", None)
    if not isinstance(primary, str) or not error.args or not isinstance(error.args[0], str):
        return None
    if str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)).startswith("22"):
        primary = _IN_QUOTES.sub('"…"', primary)  # invalid data, which the message quotes
    hint = getattr(diagnosis, "message_hint", None)
    return f"{primary}\nHINT:  {hint}" if hint else primary


def _clean(value: Any, details: list[str], values: BoundValues, depth: int = 0) -> Any:
    if depth < DEEPEST and type(value) in (list, tuple):
        return type(value)(_clean(each, details, values, depth + 1) for each in value)
    if depth < DEEPEST and type(value) is dict:
        return {name: _clean(each, details, values, depth + 1) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    text = redact(value)
    for detail in details:
        text = text.replace(detail, "…")
    return values.hide(text)
