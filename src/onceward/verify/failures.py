"""The error of a statement that fails, as a database would raise it.

A handler may look at its class, at its text, or at the code of the driver's error. The class and the text are those of
every failure after which a transaction can still commit; a code is one that the consumer's code names: an SQLSTATE of
PostgreSQL, or a result code of SQLite.
"""

from __future__ import annotations

import inspect
import re
import sqlite3
import sys
from functools import cache
from importlib import import_module
from typing import Any, Final

from sqlalchemy.exc import OperationalError

_TEXT: Final = (
    "as after: deadlock detected; could not serialize access; could not obtain lock on row in relation; canceling "
    "statement due to lock timeout; canceling statement due to statement timeout; canceling statement due to user "
    "request; timed out; out of shared memory; could not extend file: No space left on device; database is locked; "
    "database table is locked; out of memory; disk I/O error; database or disk is full"
)
_STATES: Final = {
    "40001": "SerializationFailure",
    "40P01": "DeadlockDetected",
    "55P03": "LockNotAvailable",
    "57014": "QueryCanceled",
    "53100": "DiskFull",
    "53200": "OutOfMemory",
}
"""Failures that undo a savepoint and not the whole transaction, with psycopg's names of them."""

_CODES: Final = re.compile(r"\bSQLITE_(?:BUSY|LOCKED|FULL|IOERR|NOMEM)(?:_[A-Z_]+)?\b")
"""Failures that undo a statement and not the whole transaction, or not always."""


def failed_statement(cause: Exception, drivers: frozenset[str], state: str) -> OperationalError:
    """SQLAlchemy's error, a timeout, and an error of the drivers that the handler uses itself."""
    kind = _kind(drivers, state)
    error = kind(f"a statement of the handler, {_TEXT}", None, _driver_error(cause, state))
    if state and "sqlite3" in drivers:
        _put_code(error, state)
    return error


def states_in(consumer: Any, backend: str) -> list[str]:
    """The codes that the consumer's module names: an SQLSTATE, also as a class of psycopg, or a code of SQLite."""
    module = sys.modules.get(consumer.__module__)
    try:
        source = "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):  # no source, as in an interactive session
        return []
    if backend == "sqlite":
        return [each for each in sorted(set(_CODES.findall(source))) if hasattr(sqlite3, each)]
    return [state for state, name in _STATES.items() if re.search(rf"\b({state}|{name})\b", source)]


@cache
def _kind(drivers: frozenset[str], state: str) -> type[OperationalError]:
    errors: list[Any] = [import_module(each).OperationalError for each in sorted(drivers)]
    if state and "psycopg" in drivers:
        errors = [getattr(import_module("psycopg.errors"), _STATES[state])]
    return type("OperationalError", (OperationalError, *errors, TimeoutError), {})


def _driver_error(cause: Exception, state: str) -> Exception:
    if not state:
        return cause
    if state not in _STATES:
        _put_code(failed := sqlite3.OperationalError(str(cause)), state)
        return failed
    error: Exception = getattr(import_module("psycopg.errors"), _STATES[state])(str(cause))
    return error


def _put_code(error: Any, state: str) -> None:
    """Say which failure it was, as sqlite3 does."""
    error.sqlite_errorcode, error.sqlite_errorname = getattr(sqlite3, state), state
