"""Values that a driver cannot turn into Python's: the dates 'infinity' and '0044-03-15 BC' and the time '24:00' of
PostgreSQL, which are read as the server's text, and texts in SQLite that are not UTF-8, which are read as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

_TIMES = ("date", "time", "timetz", "timestamp", "timestamptz", "interval")


def rows_of(connection: Connection, query: str) -> list[Any]:
    """The rows of a query, whatever is in them."""
    try:
        return list(connection.exec_driver_sql(query))
    except DBAPIError:  # raised by the driver, when it converts a row; if by the server, it is raised again
        driver = connection.connection.driver_connection
        lenient = _as_bytes if connection.dialect.name == "sqlite" else _as_text
        with lenient(driver):
            return list(connection.exec_driver_sql(query))


@contextmanager
def _as_bytes(driver: Any) -> Iterator[None]:
    before, driver.text_factory = driver.text_factory, _decode
    try:
        yield
    finally:
        driver.text_factory = before


def _decode(text: bytes) -> str | bytes:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


@contextmanager
def _as_text(driver: Any) -> Iterator[None]:
    from psycopg.adapt import Loader
    from psycopg.errors import DataError
    from psycopg.pq import Format

    def lenient(usual: type[Any]) -> type[Loader]:
        class Lenient(Loader):
            def __init__(self, oid: int, context: Any = None) -> None:
                super().__init__(oid, context)
                self._usual = usual(oid, context)

            def load(self, data: Any) -> Any:
                try:
                    return self._usual.load(data)
                except DataError:
                    return bytes(data).decode()

        return Lenient

    types = [driver.adapters.types[name].oid for name in _TIMES]
    before = {oid: driver.adapters.get_loader(oid, Format.TEXT) for oid in types}
    for oid, usual in before.items():
        driver.adapters.register_loader(oid, lenient(usual))
    try:
        yield
    finally:
        for oid, usual in before.items():
            driver.adapters.register_loader(oid, usual)
