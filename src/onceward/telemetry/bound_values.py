"""The values that were bound as parameters of a failed statement, wherever an error quotes them.

A trigger or a function of the database may build its own message, as in `RAISE EXCEPTION 'card % declined', NEW.card`,
which has no label to know the value by. So the values themselves are looked for, in the spellings that databases and
Python have for them. This happens only after a failure.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

SHORTEST_VALUE = 6
"""Characters. Shorter values, such as 1 or EUR, are in many texts, and hiding them would leave none to read."""
DEEPEST_VALUE = 5
"""Levels of lists, dicts and JSON in a parameter."""
HIDDEN_VALUE = "…"
NAMES = ("schema_name", "table_name", "column_name", "datatype_name", "constraint_name")
"""What PostgreSQL's diagnosis names."""
CALLS = re.compile(
    r"psycopg\.(\w*cursor\w*\.\w+|connection(_async)?\.execute)|onceward\.db\.guests\.drivers\.\w+"
)
"""Functions that know the parameters, where the driver's error does not."""
GIVEN = ("params", "params_seq", "args")
"""What they are called there."""

_LITERAL = re.compile(r"'(?:[^']|'')*'?|\b\d{7,}\b")
_GAPS = re.compile(r"[\s-]+")
_PIECE = re.compile(r"(?<!\w)\w*\d\w*")
"""Begins where a word does: trying every start of a long one takes minutes."""
_NAME = re.compile(r"[^\W\d]\w*")


def hide_literals(sql: str) -> str:
    """Hide the quoted values and long numbers of a statement."""
    return _LITERAL.sub("'…'", sql)


class BoundValues:
    """The values that were bound in the statements of some errors."""

    def __init__(self, errors: Iterable[BaseException]) -> None:
        self._spellings: dict[str, str] = {}
        """With each one in lower case."""
        self._unknown = False
        """Whether values are not known: those of a commit are of any earlier statement, and sqlite3 keeps none."""
        errors = list(errors)
        self._wrapped = {id(getattr(each, "orig", None)) for each in errors}
        for error in errors:
            with suppress(Exception):  # objects of the user
                self._look_at(error)

    def __bool__(self) -> bool:
        return self._unknown or bool(self._spellings)

    def hide(self, text: str) -> str:
        """Replace each value that the text quotes."""
        if self._unknown:
            text = hide_literals(text)
        lower = text.lower()
        found = [each for each, small in self._spellings.items() if small in lower]
        if not found:
            return text
        pattern = "|".join(map(_pattern, sorted(found, key=len, reverse=True)))
        return re.sub(pattern, HIDDEN_VALUE, text, flags=re.IGNORECASE)

    def _look_at(self, error: BaseException) -> None:
        is_wrapped = hasattr(error, "hide_parameters")  # a StatementError of SQLAlchemy
        statement = getattr(error, "statement", None) if is_wrapped else None
        given = [getattr(error, "params", None)] if is_wrapped else list(_given(error.__traceback__))
        self._unknown |= (is_wrapped and statement is None) or self._is_of_own_connection(error, given)
        names = _names(error, statement)
        for bound in given:
            self._add(_spellings(bound), names)
        if isinstance(statement, str):  # a literal may also be a name, unless it has many digits
            literals = (each.strip("'") for each in _LITERAL.findall(statement))
            long = (each for each in literals if sum(map(str.isdigit, each)) >= SHORTEST_VALUE)
            self._add((each for literal in long for each in _texts(literal)), names)

    def _is_of_own_connection(self, error: BaseException, given: list[Any]) -> bool:
        """Whether it is from sqlite3 itself, which has no frame to look into."""
        return isinstance(error, sqlite3.Error) and not given and id(error) not in self._wrapped

    def _add(self, spellings: Iterable[str], names: set[str]) -> None:
        for each in spellings:
            small = each.lower()
            if small not in names:
                self._spellings[each] = small


def _pattern(spelling: str) -> str:
    """A word is hidden where it stands alone: `custom` is not a value in `customer`."""
    word = re.escape(spelling)
    return rf"(?:(?<!\w)|(?<=\\[nrt])){word}(?!\w)" if spelling.isalpha() else word


def _names(error: BaseException, statement: Any) -> set[str]:
    """What names a thing, in lower case: words of the statement, which is shown anyway, and of the diagnosis."""
    names = set(_NAME.findall(hide_literals(statement))) if isinstance(statement, str) else set()
    for diagnosis in (getattr(each, "diag", None) for each in (error, getattr(error, "orig", None))):
        names.update(str(getattr(diagnosis, name, None)) for name in NAMES)
    return {each.lower() for each in names}


def _given(link: TracebackType | None) -> Iterator[Any]:
    """Yield what a driver was given, by the calls that an error came through."""
    while link is not None:
        frame = link.tb_frame
        if CALLS.fullmatch(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"):
            variables = frame.f_locals
            yield [variables[name] for name in GIVEN if name in variables]
        link = link.tb_next


def _spellings(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield what a value looks like in messages, for it and all that is in it."""
    if depth > DEEPEST_VALUE or value is None or isinstance(value, bool):
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    elif isinstance(value, (bytes, bytearray, memoryview)):
        value = bytes(value)
        yield from _long(value.hex())
        value = value.decode("utf-8", "backslashreplace")
    elif hasattr(value, "obj") and type(value).__module__.startswith("psycopg."):  # Json, Jsonb
        value = [value.obj]
    if isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _spellings(each, depth + 1)
        return
    text = str(value)
    if not isinstance(value, str):
        yield from _long(repr(value))
        if isinstance(value, float) and value.is_integer():
            yield from _long(str(int(value)))
        if hasattr(value, "isoformat"):
            yield from _long(value.isoformat())
    elif text.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):
            yield from _spellings(json.loads(text), depth + 1)
    yield from _texts(text)


def _texts(text: str) -> Iterator[str]:
    plain = text.strip()
    escaped = repr(plain)[1:-1]
    for each in (
        plain,
        plain.upper(),
        plain.lower(),
        escaped,
        repr(escaped)[1:-1],
        json.dumps(plain)[1:-1],
        plain.replace("'", "''"),
        plain.replace("\\", "\\\\").replace('"', '\\"'),  # in an array or a row of PostgreSQL
        plain.replace('"', '""'),
        _GAPS.sub("", plain),
        *_PIECE.findall(plain),
    ):
        yield from _long(each)


def _long(text: str) -> Iterator[str]:
    if len(text) >= SHORTEST_VALUE:
        yield text
