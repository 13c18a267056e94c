"""The fixture of the tests of dead letters, a pytest plugin beside `tests.databases`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from onceward.connectors import dead_letters as wrapper
from onceward.deadletters import rows
from tests.integration.deadletters_world import Letters

if TYPE_CHECKING:
    from tests.databases import Database


@pytest.fixture
def letters(database: Database, monkeypatch: pytest.MonkeyPatch) -> Letters:
    """An empty store, on each database, in threads and in asyncio, whose time only the test moves."""
    monkeypatch.setitem(rows._NOW, "postgresql", "(SELECT at FROM virtual_clock)")
    monkeypatch.setattr(wrapper, "LOOK_EVERY", 0.0)
    return Letters(database)
