"""The fixture of the dead-letter tests, a pytest plugin like `tests.support.databases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from onceward.deadletters import operations
from onceward.deadletters.source import base as wrapper
from onceward.storage.database import Sql
from tests.support.deadletters.world import Letters

if TYPE_CHECKING:
    from tests.support.databases import Database


class OnVirtualClock(Sql):
    """The dead letters use the test's clock, the inbox the database's."""

    def __init__(self, dialect: str, clock: Callable[[], float]) -> None:
        super().__init__(dialect, clock)
        if dialect == "postgresql":
            self._now = self._steady = "(SELECT at FROM virtual_clock)"


@pytest.fixture
def letters(database: Database, monkeypatch: pytest.MonkeyPatch) -> Letters:
    """An empty store on each database, in threads and in asyncio, whose time only the test moves."""
    monkeypatch.setattr(operations, "Sql", OnVirtualClock)
    monkeypatch.setattr(wrapper, "CHECK_EVERY", 0.0)
    return Letters(database)
