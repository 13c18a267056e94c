"""A program whose user code forks, wherever the framework calls it: `python -m tests.support.forks threads PLACE`.

Each message names what its child does. Prints, as JSON, how each child ended, by place and message, and what the source
counted. A child that comes back and goes on as a second worker prints, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import AsyncConsumerTask, ConsumerTask, Onceward, Transaction
from onceward.app.lifespan import shared_services
from onceward.connectors import AsyncSqliteConnector, SqliteConnector
from onceward.db import AsyncDbSession, DbSession
from onceward.db.handlers import async_attempts, attempts
from onceward.inbox import AsyncInbox, Inbox
from onceward.testing.inbox.samples import contract
from tests.support.world import consuming

CHILDREN = ("raises", "returns", "exits", "interrupts", "leaves", "executes", "works")
TASKS = ("process", "success", "exception", "inbox", "effect", "session")


def _raise(error: BaseException) -> None:
    raise error


IN_CHILD: dict[str, Callable[[], Any]] = {
    "raises": lambda: _raise(RuntimeError("an error of the \x1b]0;child\nonceward: forged")),
    "returns": lambda: None,
    "exits": lambda: sys.exit(3),
    "interrupts": lambda: _raise(KeyboardInterrupt()),
    "leaves": lambda: os._exit(4),
    "executes": lambda: os.execv("/bin/true", ["true"]),
}


class Place:
    """Where user code forks, and how each child ended."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.ended: dict[str, int | None] = {}

    def fork(self, kind: str) -> None:
        if kind == "works":
            worker = multiprocessing.get_context("fork").Process(target=sum, args=([1],))
            worker.start()
            worker.join()
            self.ended[kind] = worker.exitcode
            return
        child = os.fork()
        if child == 0:
            IN_CHILD[kind]()
            return
        self.ended[kind] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def at(self, name: str, transaction: Transaction) -> None:
        if name == self.name:
            self.fork(transaction.id)
        elif name == "process" and self.name == "exception":
            raise RuntimeError("for the exception handler")


class Plain(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None:
        place: Place = self.services["place"]
        place.at("process", transaction)
        if place.name == "session":
            with DbSession(self.services["engine"]) as session:
                session.execute("SELECT 1")
                place.at("session", transaction)

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> None:
        self.services["place"].at("success", transaction)

    def handle_transaction_exception(self, transaction: Transaction, error: Any) -> None:
        self.services["place"].at("exception", transaction)


class Contracted(ConsumerTask):
    contract = contract(mode="effectful")

    def process_transaction(self, transaction: Transaction, session: Any) -> None:
        place: Place = self.services["place"]
        place.at("inbox", transaction)
        session.effect("call", lambda key: place.at("effect", transaction))  # refused in a child


class AsyncPlain(AsyncConsumerTask):
    async def process_transaction(self, transaction: Transaction) -> None:
        place: Place = self.services["place"]
        place.at("process", transaction)
        if place.name == "session":
            async with AsyncDbSession(self.services["engine"]) as session:
                await session.execute("SELECT 1")
                place.at("session", transaction)

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> None:
        self.services["place"].at("success", transaction)

    async def handle_transaction_exception(self, transaction: Transaction, error: Any) -> None:
        self.services["place"].at("exception", transaction)


class AsyncContracted(AsyncConsumerTask):
    contract = contract(mode="effectful")

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:
        place: Place = self.services["place"]
        place.at("inbox", transaction)

        async def call(key: str) -> None:
            place.at("effect", transaction)

        await session.effect("call", call)


EVENTS = [Transaction(kind, metadata={"event_type": "order.paid"}) for kind in CHILDREN]


def in_threads(place: Place) -> dict[str, int]:
    engine = create_engine(f"sqlite:///{place.directory}/{place.name}.db")
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(Contracted.contract)
    queue = SqliteConnector(place.directory / f"{place.name}-queue.db", on_failure="dead_letter")
    queue.dispatch_transactions(EVENTS)
    kind = Contracted if place.name in ("inbox", "effect") else Plain
    services = {"place": place, "inbox": inbox, "engine": engine}
    task: Any = kind(connectors={"source": queue}, services=services)
    task.consume_transactions(consuming(batch=2))
    return queue.counts()


async def in_asyncio(place: Place) -> dict[str, int]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{place.directory}/{place.name}.db")
    inbox = AsyncInbox(engine)
    await inbox.migrate()
    await inbox.register(AsyncContracted.contract)
    queue = AsyncSqliteConnector(place.directory / f"{place.name}-queue.db", on_failure="dead_letter")
    await queue.dispatch_transactions_async(EVENTS)
    kind = AsyncContracted if place.name in ("inbox", "effect") else AsyncPlain
    services = {"place": place, "inbox": inbox, "engine": engine}
    task: Any = kind(connectors={"source": queue}, services=services)
    await task.consume_transactions(consuming(batch=2))
    counts = await queue.counts_async()
    await engine.dispose()
    return counts


def honest_loop(place: Place, mode: str) -> None:
    """What the consumers of queues and boundaries run for each message."""

    def handle(kind: str, session: Any) -> None:
        place.fork(kind)

    async def handle_async(kind: str, session: Any) -> None:
        place.fork(kind)

    async def body() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{place.directory}/loop.db")
        for each in CHILDREN:
            assert await async_attempts(handle_async, engine)(each) is None
        await engine.dispose()

    async def body_in_threads() -> None:
        attempt = attempts(handle, create_engine(f"sqlite:///{place.directory}/loop.db"))
        for each in CHILDREN:
            assert await attempt(each) is None

    asyncio.run(body() if mode == "asyncio" else body_in_threads())


def services(place: Place) -> None:
    for kind in CHILDREN:
        app = Onceward("forking")

        @app.service
        def client(kind: str = kind) -> Iterator[object]:
            place.fork(kind)
            yield object()

        @app.consumer("memory://orders")
        def charge(order: dict, client: object) -> None:  # type: ignore[type-arg]
            pass

        with shared_services(app, list(app.consumers.values())):
            pass


def main(mode: str, directory: Path) -> None:
    logging.disable(logging.CRITICAL)
    ended: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    for name in TASKS:
        place = Place(name, directory)
        counts[name] = in_threads(place) if mode == "threads" else asyncio.run(in_asyncio(place))
        ended[name] = place.ended
    place = Place("loop", directory)
    honest_loop(place, mode)
    ended["loop"] = place.ended
    place = Place("service", directory)
    services(place)
    ended["service"] = place.ended
    sys.stdout.write(json.dumps({"ended": ended, "counts": counts}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
