"""Calls that are one statement, without SQLAlchemy: it would take as long as the server."""

from __future__ import annotations

import select
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from onceward.db.calls import CALLS
from onceward.db.detached_connection import DetachedConnection
from onceward.db.poolers import is_to_server
from onceward.telemetry.redaction import scrub


class DirectConnection:
    """One connection in autocommit, for one thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._errors: type[Exception] = engine.dialect.loaded_dbapi.Error
        self._kept = DetachedConnection()
        weakref.finalize(self, self._kept.close)  # also if nobody closes this
        self._cursor: Any = None
        self._idle = select.poll()
        """Finds something to read while nothing was asked."""
        self._closed = False
        self._using = threading.Lock()

    def execute(self, statement: str, values: Sequence[Any]) -> list[Any] | None:
        """Return the rows of a statement; None, without having executed it, if another thread is just using the
        connection. Raises what SQLAlchemy raises."""
        if not self._using.acquire(blocking=False):
            return None
        try:
            self._kept.leave_to_parent()
            if self._kept.driver is None or self._idle.poll(0):
                self._connect()
            with CALLS.call_on(self._kept.driver):
                found: list[Any] = self._cursor.execute(statement, values).fetchall()
            return found
        except BaseException as error:
            driver = self._kept.driver
            if driver is not None and driver.closed:
                self._engine.dispose()  # what the pool has is lost, too
            self._kept.close()  # a reply may still be on its way
            if isinstance(error, self._errors):
                raise self._as_sqlalchemy(statement, error) from error
            raise
        finally:
            if self._closed:
                self._kept.close()
            self._using.release()

    def _connect(self) -> None:
        if self._kept.driver is not None:  # the server has said something: that it is leaving
            self._kept.close()
            self._engine.dispose()  # it said so to the connections of the pool, too
        driver = self._kept.open(self._engine)
        self._cursor = driver.cursor()
        if is_to_server(driver):
            driver.prepare_threshold = (
                0  # at once: the server takes half as long for a statement that it has ready
            )
        self._idle = select.poll()
        self._idle.register(driver.fileno(), select.POLLIN)

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
