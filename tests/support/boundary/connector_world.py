"""A real boundary, with connectors of both modes behind the same calls."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onceward import Transaction
from onceward.boundary import AsyncBoundaryClient, BoundaryClient, Page
from onceward.boundary.boundary import Boundary
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.connectors.boundary import AsyncBoundaryConnector, BoundaryConnector
from onceward.connectors.boundary.facts import as_fact
from onceward.testing.clock import FakeClock
from onceward.transaction import Settlement, Verdict
from tests.support.boundary.server import boundary_server
from tests.support.world import World, system

RECEIVER = "receiver"


def made(number: int, subject: str | None = None, **more: Any) -> Transaction:
    payload = {"subject": subject or f"batch:{number}", "predicate": "made", "object": {"number": number}}
    return Transaction(id=f"m{number}", payload=payload, **more)


def numbers(transactions: Sequence[Transaction]) -> list[int]:
    return [transaction.payload["object"]["number"] for transaction in transactions]


class ConnectorWorld:
    def __init__(self, world: World, url: str) -> None:
        self.world = world
        self.url = url
        self.clock = FakeClock(1_700_000_000.0)
        self.asked: list[int] = []
        """The limit of each fetch."""
        self.sent: list[int] = []
        """How many facts came with each fetch."""
        self.confirmed: list[int] = []
        self.on_confirm: Callable[[int], Any] = lambda _: None
        self.client: Any = self._watched((AsyncBoundaryClient if world.asynchronous else BoundaryClient)(url))

    def connector(self, name: str | None = RECEIVER, **settings: Any) -> Any:
        kind: Any = AsyncBoundaryConnector if self.world.asynchronous else BoundaryConnector
        settings = {"from_zone": "plant-a", "to_zone": "hq", "clock": self.clock, **settings}
        return kind(self.client, name, **settings)

    def cursor(self, name: str = RECEIVER) -> int:
        with urllib.request.urlopen(f"{self.url}/stats") as answer:
            consumers = json.load(answer)["consumers"]
        return next(each["offset"] for each in consumers if each["name"] == name)

    def log(self) -> list[int]:
        with BoundaryClient(self.url) as client:
            return [fact.fact.object["number"] for fact in client.fetch("a look", 1000).facts]

    # ── the connector's methods, in either mode ─────────────────────────────────────────────────────────

    def call(self, connector: Any, method: str, *arguments: Any) -> Any:
        return self.world.run(getattr(connector, method + "_async" * self.world.asynchronous), *arguments)

    def dispatch(self, connector: Any, *transactions: Transaction) -> None:
        self.call(connector, "dispatch_transactions", transactions)

    def fetch(self, connector: Any, size: int = 100) -> list[Transaction]:
        return list(self.call(connector, "fetch_transactions", size))

    def done(self, connector: Any, *transactions: Transaction) -> None:
        settlements = [Settlement(each, Verdict.DONE) for each in transactions]
        self.call(connector, "settle_transactions", settlements)

    def fail(self, connector: Any, *transactions: Transaction, error: Any = None) -> None:
        settlements = [Settlement(each, Verdict.FAILED, error or system()) for each in transactions]
        self.call(connector, "settle_transactions", settlements)

    # ── observing ───────────────────────────────────────────────────────────────────────────────────────

    def _watched(self, client: Any) -> Any:
        fetch, confirm = client.fetch, client.confirm

        def reported(page: Page, limit: int) -> Page:
            self.asked.append(limit)
            self.sent.append(len(page.facts))
            return page

        def before(offset: int) -> None:
            self.on_confirm(offset)
            self.confirmed.append(offset)

        async def fetch_async(name: str, limit: int, *more: int) -> Page:
            return reported(await fetch(name, limit, *more), limit)

        async def confirm_async(name: str, offset: int) -> int:
            before(offset)
            return await confirm(name, offset)  # type: ignore[no-any-return]

        def confirm_now(name: str, offset: int) -> int:
            before(offset)
            return confirm(name, offset)  # type: ignore[no-any-return]

        if self.world.asynchronous:
            client.fetch, client.confirm = fetch_async, confirm_async
        else:
            client.fetch, client.confirm = (
                lambda name, limit, *more: reported(fetch(name, limit, *more), limit),
                confirm_now,
            )
        return client


def fill(directory: Path, count: int) -> None:
    """Append this many facts, faster than through a server."""

    async def append() -> None:
        store = SqliteBoundaryStore(directory)
        facts = [as_fact(made(number), ("plant-a", "hq"), {}) for number in range(1, count + 1)]
        await asyncio.gather(*(Boundary(store).append(envelope, fact) for envelope, fact in facts))
        await store.close()

    asyncio.run(append())


@contextmanager
def site_at(world: World, directory: Path) -> Iterator[ConnectorWorld]:
    with boundary_server(directory) as url:
        made = ConnectorWorld(world, url)
        yield made
        world.run(made.client.close)
