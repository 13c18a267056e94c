"""The NATS JetStream store under the suite of all stores."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from onceward.boundary.store import BoundaryStore
from onceward.boundary.stores.jetstream.store import JetStreamBoundaryStore
from onceward.testing import servers
from onceward.testing.boundary import StoreConformance


@pytest.fixture(scope="module")
def nats() -> Iterator[servers.Server]:
    with servers.nats_server() as server:
        yield server


class TestJetStreamStore(StoreConformance):
    is_shared = True

    @pytest.fixture(autouse=True)
    def _own_name(self, nats: servers.Server) -> Iterator[None]:
        self.nats = nats
        self.name = f"test-{uuid.uuid4().hex}"
        with ExitStack() as self.examples:
            yield

    async def open(self) -> BoundaryStore:
        return await JetStreamBoundaryStore.open(self.nats.url, name=self.name)

    async def fresh(self) -> BoundaryStore:
        """With its own NATS: one with the streams of all examples would take long to restart."""
        self.examples.close()
        self.nats = self.examples.enter_context(servers.nats_server())
        self.name = f"test-{uuid.uuid4().hex}"
        return await self.open()

    async def crash(self, store: BoundaryStore) -> BoundaryStore:
        """NATS dies and comes back while the store is open."""
        if self.nats.is_ours:
            self.nats.kill()
            self.nats.start()
        await store.close()
        return await self.open()
