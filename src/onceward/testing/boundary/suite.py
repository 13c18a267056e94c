"""The base of the suite: a store to open, and facts to append."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from onceward.boundary.model import Envelope, Fact
from onceward.boundary.store import BoundaryStore, NewFact
from onceward.boundary.wire import record

T = TypeVar("T")


def fact(
    message_id: str,
    content: str = "",
    stream: str = "operational",
    appended_at: int | None = None,
    within: int | None = None,
) -> NewFact:
    """A fact with the digest of its content."""
    envelope = Envelope(message_id=message_id, from_zone="a", to_zone="b", produced_at_unix_ms=1)
    body = Fact(subject="batch:B1", predicate="done", object_json=f'"{content}"')
    digest = hashlib.sha256(content.encode()).digest()
    return NewFact(message_id, digest, record(envelope, body), stream, appended_at, within)


class StoreSuite:
    """Override `open`. Each test has its own `place`; every call in a test opens the same one."""

    is_shared = False
    """Whether several servers may open the store at a time."""

    @pytest.fixture(autouse=True)
    def _own_place(self, tmp_path: Path) -> None:
        self.place = tmp_path

    async def open(self) -> BoundaryStore:
        raise NotImplementedError

    @asynccontextmanager
    async def store(self) -> AsyncIterator[BoundaryStore]:
        store = await self.open()
        try:
            yield store
        finally:
            await store.close()

    def on_store(self, body: Callable[[BoundaryStore], Awaitable[T]]) -> T:
        """Open a store, run `body` on it, and close it."""

        async def main() -> T:
            async with self.store() as store:
                return await body(store)

        return asyncio.run(main())


def with_store(test: Callable[[Any, BoundaryStore], Awaitable[None]]) -> Callable[[Any], None]:
    """Turn a coroutine into a test that runs it on an open store."""

    @functools.wraps(test)
    def run(self: StoreSuite) -> None:
        self.on_store(functools.partial(test, self))

    del run.__wrapped__  # pytest would take `store` for a fixture
    return run
