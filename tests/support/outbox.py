"""An app with an outbox, and sinks that keep what arrives, for tests of the relay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from onceward import Onceward, Transaction
from onceward.backoff import Backoff
from onceward.inbox import Inbox
from onceward.outbox.relay import Relay, RelayRules
from onceward.transaction import Settlement, Verdict
from tests.support.schema import new_schema

QUICK = RelayRules(backoff=Backoff(0.01, cap=0.02), most_failures=3)


class Sink:
    """A connector of the test's own. What it refuses raises what `refuse` returns."""

    def __init__(self) -> None:
        self.arrived: list[Transaction] = []
        self.calls = 0
        self.refuse: Callable[[Transaction], Exception | None] = lambda _: None
        self.before: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    @property
    def payloads(self) -> list[Any]:
        return [each.payload for each in self.arrived]

    def open(self, *, asynchronous: bool) -> Sink:
        assert not asynchronous
        return self

    def dispatch_transactions(self, transactions: list[Transaction]) -> None:
        self.before()
        for each in transactions:
            if error := self.refuse(each):
                raise error
        with self._lock:
            self.calls += 1
            self.arrived += transactions

    def close(self) -> None: ...


class OutboxWorld:
    """An app on one database, with a sink for each target."""

    def __init__(self, url: str) -> None:
        self.app = Onceward("shop", database=url)
        self.engine: Engine = self.app.create_engine()
        self.sinks: dict[str, Sink] = {}
        self._relays: list[Relay] = []
        Inbox(self.engine).migrate()

    @property
    def sink(self) -> Sink:
        """The one for `redis://x/ship`."""
        return self.sinks.setdefault("redis://x/ship", Sink())

    def send(self, *payloads: Any, target: str = "redis://x/ship", **given: Any) -> list[str]:
        """Send these in one transaction."""
        with self.engine.begin() as connection:
            return [self.app.outbox(connection).send(target, each, **given) for each in payloads]

    def relay(self, *, lease: float = 30.0, rules: RelayRules = QUICK, **given: Any) -> Relay:
        def address_of(target: str) -> Any:
            return self.sinks.setdefault(target, Sink())

        made = Relay(self.engine, address_of, lease=lease, rules=rules, **given)
        self._relays.append(made)
        return made

    def rows(self, what: str = "state") -> list[Any]:
        """A column of all messages, in order."""
        with self.engine.connect() as connection:
            return list(
                connection.execute(text(f"SELECT {what} FROM onceward_outbox ORDER BY seq")).scalars()
            )

    def close(self) -> None:
        for each in self._relays:
            each.close()
        self.engine.dispose()


def turn(relay: Relay) -> int:
    """One turn of the engine: fetch, publish, settle. Return how many deliveries there were."""
    fetched = relay.fetch_transactions(16)
    for each in fetched:
        relay.publish(each)
    relay.settle_transactions([Settlement(each, Verdict.DONE) for each in fetched])
    return len(fetched)


def drain(relay: Relay) -> None:
    """Turn until nothing is due."""
    while turn(relay):
        pass


@contextmanager
def outbox_on_postgresql(url: str) -> Iterator[OutboxWorld]:
    """An outbox in a schema of its own."""
    with new_schema(url) as schema:
        world = OutboxWorld(schema.plain_url)
        try:
            yield world
        finally:
            world.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxWorld]:
    if request.param == "sqlite":
        world = OutboxWorld(f"sqlite:///{tmp_path}/shop.db")
        try:
            yield world
        finally:
            world.close()
        return
    with outbox_on_postgresql(request.getfixturevalue("postgres_url")) as world:
        yield world
