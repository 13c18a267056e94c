"""The PostgreSQL store under the suite of all stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onceward.boundary.store import BoundaryStore
from onceward.boundary.stores.postgresql.store import PostgreSqlBoundaryStore
from onceward.testing.boundary import StoreConformance
from tests.support.boundary.databases import StorePlace, shared_place

__all__ = ["shared_place"]


class TestPostgreSqlStore(StoreConformance):
    is_shared = True

    @pytest.fixture(autouse=True)
    def in_an_empty_database(self, shared_place: StorePlace) -> Iterator[None]:
        self.database = shared_place
        yield
        shared_place.empty()

    async def open(self) -> BoundaryStore:
        return await PostgreSqlBoundaryStore.open(self.database.url)

    async def fresh(self) -> BoundaryStore:
        store = await self.open()
        self.database.empty()
        return store

    async def crash(self, store: BoundaryStore) -> BoundaryStore:
        """Kill its connections, without an orderly close."""
        assert self.database.kill_connections() > 0
        await store.close()
        return await self.open()
