"""A schema of a test's own on the PostgreSQL of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, text

_kept: dict[str, Engine] = {}


@contextmanager
def keeping_a_connection(url: str) -> Iterator[None]:
    """Make and drop the schemas of this server on one connection: opening one takes longer than that."""
    _kept[url] = _admin_of(url)
    try:
        yield
    finally:
        _kept.pop(url).dispose()


def _admin_of(url: str) -> Engine:
    return create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)


class Schema:
    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"test_{uuid4().hex}"
        self._admin = _kept.get(url) or _admin_of(url)
        self.execute(f"CREATE SCHEMA {self.name}")

    @property
    def connect_args(self) -> dict[str, Any]:
        """With them, an engine of `url` is in this schema."""
        return {"options": f"-csearch_path={self.name}"}

    @property
    def plain_url(self) -> str:
        """A URL without a driver, which is in this schema by itself."""
        plain = self.url.replace("postgresql+psycopg://", "postgresql://", 1)
        return f"{plain}{'&' if '?' in plain else '?'}options=-csearch_path%3D{self.name}"

    def execute(self, sql: str) -> list[Any]:
        with self._admin.connect() as connection:
            result = connection.execute(text(sql))
            return list(result) if result.returns_rows else []

    def drop(self) -> None:
        self.execute(f"DROP SCHEMA {self.name} CASCADE")
        if self.url not in _kept:
            self._admin.dispose()


@contextmanager
def new_schema(url: str) -> Iterator[Schema]:
    """It is dropped in the end, with all that is in it."""
    made = Schema(url)
    try:
        yield made
    finally:
        made.drop()


@contextmanager
def url_of(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty database of this kind, `sqlite` or `postgresql`."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/shop.db"
        return
    with new_schema(request.getfixturevalue("postgres_url")) as schema:
        yield schema.plain_url
