"""A table in the database of a test, whichever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.databases import Database

INSERT = "INSERT INTO orders (id, item) VALUES (:id, 'tea')"


@pytest.fixture(autouse=True)
def _orders(request: pytest.FixtureRequest) -> None:
    for name in {"database", "postgresql", "sqlite"} & set(request.fixturenames):
        request.getfixturevalue(name).do("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")


def orders(database: Database) -> int:
    count = database.scalar("SELECT count(*) FROM orders")
    assert isinstance(count, int)
    return count
