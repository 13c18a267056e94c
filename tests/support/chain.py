"""An app whose outbox sends to a real sink, and the consumer that takes the messages from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from onceward import Contract, Onceward
from onceward.app.build import open_task
from onceward.inbox import Inbox
from onceward.inspection.balance import Balance
from onceward.inspection.counts import Account, balance_of
from onceward.inspection.outbox_balance import balance_outbox
from onceward.outbox.relay import Relay
from onceward.outbox.targets import address
from onceward.testing.servers import nats_server
from tests.support.boundary.server import boundary_server
from tests.support.outbox import turn
from tests.support.schema import new_schema

SINKS = ("sqlite", "redis", "postgresql", "jetstream", "boundary")


class Chain:
    """One database with an outbox, and one sink."""

    def __init__(self, kind: str, database: str, source: str, sink: str | None = None) -> None:
        self.kind = kind
        self.database = database
        self.app = Onceward("shop", database=database)
        self.received: list[Any] = []
        contract = Contract(
            consumer_id="ship",
            event_types=["*"],
            owner_team="shop",
            idempotency_mechanism="one transaction",
        )

        @self.app.consumer(source, contract=contract)
        def ship(order: Any, session: Any) -> None:
            self.received.append(order)

        self.target: Any = sink or ship
        self.engine: Engine = self.app.create_engine()
        Inbox(self.engine).migrate()

    def payload(self, number: int) -> Any:
        if self.kind == "boundary":
            return {"subject": f"order:{number}", "predicate": "placed", "object": {"number": number}}
        return {"number": number}

    def send(self, *numbers: int, **given: Any) -> list[str]:
        with self.engine.begin() as connection:
            outbox = self.app.outbox(connection)
            return [
                outbox.send(self.target, self.payload(number), key="customer", **given) for number in numbers
            ]

    def relay(self) -> None:
        """Publish all that is due."""
        relay = Relay(self.engine, lambda target: address(target, self.app.outbox.targets))
        try:
            while self.rows("count(*)", "state = 'ready'") != [0]:
                turn(relay)
        finally:
            relay.close()

    def consume(self) -> list[int]:
        """Consume all that is there, several at once. Return the numbers of the orders so far, sorted."""
        [consumer] = self.app.consumers.values()
        with open_task(self.app, consumer) as task:
            task.consume_transactions(consumer.policy.model_validate({"loop": {"batch": {"size": 50}}}))
        return sorted(each.get("object", each)["number"] for each in self.received)

    def rows(self, what: str, where: str = "1 = 1") -> list[Any]:
        with self.engine.connect() as connection:
            found = connection.execute(text(f"SELECT {what} FROM onceward_outbox WHERE {where}"))
            return list(found.scalars())

    def execute(self, *statements: str) -> None:
        with self.engine.begin() as connection:
            for each in statements:
                connection.execute(text(each))

    def balance(self) -> Balance:
        """Of the outbox."""
        found = balance_outbox(self.database, lambda target: address(target, self.app.outbox.targets))
        [account] = found.values()
        return account.balance

    def balance_of_consumer(self) -> Balance:
        [consumer] = self.app.consumers.values()
        return balance_of(Account(consumer.source, "ship", self.database, contract=True, may_be_new=True))

    def close(self) -> None:
        self.engine.dispose()


@contextmanager
def chain_to(
    kind: str, folder: Path, request: pytest.FixtureRequest, database: str | None = None
) -> Iterator[Chain]:
    """A chain to one kind of sink, with its outbox in a file."""
    database = database or f"sqlite:///{folder}/shop.db"
    name = f"ship-{uuid4().hex[:8]}"
    sink = None
    with ExitStack() as stack:
        if kind == "sqlite":
            source = f"sqlite:///{folder}/ship.db"
        elif kind == "redis":
            source = f"{request.getfixturevalue('redis_url')}/{name}?group=ship"
        elif kind == "postgresql":
            schema = stack.enter_context(new_schema(request.getfixturevalue("postgres_url")))
            source = f"{schema.plain_url}&queue={name}"
        elif kind == "jetstream":
            source = f"{stack.enter_context(nats_server()).url}/{name}?consumer=ship"
        else:
            url = f"boundary+{stack.enter_context(boundary_server(folder))}"
            source, sink = f"{url}?consumer=ship", f"{url}?from_zone=shop&to_zone=shop"
        made = Chain(kind, database, source, sink)
        stack.callback(made.close)
        yield made
