"""Calls that are one statement, without SQLAlchemy: it would take as long as the server."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from onceward.db.detached_connection import DetachedConnection
from onceward.telemetry.redaction import scrub


class DirectConnection:
    """One connection in autocommit, for one thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._errors: type[Exception] = engine.dialect.loaded_dbapi.Error
        self._kept = DetachedConnection()
        weakref.finalize(self, self._kept.close)  # also if nobody closes this
        self._cursor: Any = None
        self._closed = False
        self._using = threading.Lock()

    def execute(self, statement: str, values: Sequence[Any]) -> list[Any] | None:
        """Return the rows of a statement; None, without having executed it, if another thread is just using the
        connection. Raises what SQLAlchemy raises."""
        if not self._using.acquire(blocking=False):
            return None
        try:
            self._kept.leave_to_parent()
            if self._kept.driver is None:
                self._cursor = self._kept.open(self._engine).cursor()
            found: list[Any] = self._cursor.execute(statement, values).fetchall()
            return found
        except BaseException as error:
            self._kept.close()  # a reply may still be on its way
            if isinstance(error, self._errors):
                raise self._as_sqlalchemy(statement, error) from error
            raise
        finally:
            if self._closed:
                self._kept.close()
            self._using.release()

    def close(self) -> None:
        """Close it, or have the thread that is using it do so: the server may not answer."""
        self._closed = True
        if self._using.acquire(blocking=False):
            self._kept.close()
            self._using.release()

    def _as_sqlalchemy(self, statement: str, error: Exception) -> BaseException:
        raised = DBAPIError.instance(
            statement, None, error, self._errors, hide_parameters=True, dialect=self._engine.dialect
        )
        scrub(raised)
        return raised
