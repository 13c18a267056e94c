"""Measures how much code a message passes through: calls, functions, files and switches between files on four walks.

    python tools/walks.py [--list WALK]

`plain SQLite`, `Redis asyncio` and `contract` go from the fetch of the first message to the user's code; `contract` has
an inbox and a dead-letter store, as in an app. `dead letter` goes from the failure of a handler to the commit of the
row in the store. Each resumption of a generator or coroutine is a call; a comprehension is not, as Python 3.12 has it.
The shortest of five runs counts: in longer ones, the loop's thread did other work in between.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy import create_engine, event

import onceward
from onceward import AsyncConsumerTask, ConsumerPolicy, ConsumerTask, Contract, Inbox, Transaction
from onceward.connectors import SqliteConnector
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.deadletters import DeadLetters
from onceward.deadletters.source import WithDeadLetters
from onceward.testing.servers import redis_server

ROOT = f"{Path(onceward.__file__).parent}/"
RUNS = 5
POLICY = ConsumerPolicy.model_validate({"loop": {"batch": {"size": 1}}})
MESSAGE = Transaction("m1", {"cents": 900}, {"event_type": "order-placed"})
CONTRACT = Contract(
    consumer_id="charge",
    event_types=["order-placed"],
    owner_team="shop",
    idempotency_mechanism="the charge and the inbox's record are one transaction",
)


class Walk:
    """Records calls of onceward from `start` to `stop`, in all threads that start inside its block."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """Pairs of file and function."""
        self._running = False

    def __enter__(self) -> Walk:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def start(self) -> None:
        self._running = not self.calls

    def stop(self) -> None:
        self._running = False

    def _profile(self, frame: FrameType, what: str, _: object) -> None:
        code = frame.f_code
        if self._running and what == "call" and code.co_filename.startswith(ROOT):
            if code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>"):
                return
            self.calls.append((code.co_filename.removeprefix(ROOT), code.co_qualname))


def plain_sqlite(walk: Walk, directory: Path) -> None:
    class Source(SqliteConnector):
        def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
            walk.start()
            return super().fetch_transactions(batch_size, **extra)

    class Consume(ConsumerTask):
        def process_transaction(self, transaction: Transaction) -> None:
            walk.stop()

    with Source(directory / "queue.db") as source:
        source.dispatch_transactions([MESSAGE])
        with walk:
            Consume({"source": source}).consume_transactions(POLICY)


def redis_asyncio(walk: Walk, _: Path) -> None:
    class Source(AsyncRedisStreamsConnector):
        async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
            walk.start()
            return await super().fetch_transactions_async(batch_size, **extra)

    class Consume(AsyncConsumerTask):
        async def process_transaction(self, transaction: Transaction) -> None:
            walk.stop()

    async def consume(url: str) -> None:
        async with Source(url, "orders") as source:
            with walk:
                await Consume({"source": source}).consume_transactions(POLICY)

    with redis_server() as server:
        with RedisStreamsConnector(server.url, "orders") as queue:
            queue.dispatch_transactions([MESSAGE])
        asyncio.run(consume(server.url))


def contract(walk: Walk, directory: Path) -> None:
    class Consume(ConsumerTask):
        contract = CONTRACT

        def process_transaction(self, transaction: Transaction, session: Any) -> None:
            walk.stop()

    _consume(walk, directory, Consume, on_fetch=walk.start)


def dead_letter(walk: Walk, directory: Path) -> None:
    class Consume(ConsumerTask):
        contract = CONTRACT

        def process_transaction(self, transaction: Transaction, session: Any) -> None:
            walk.start()
            raise RuntimeError("no connection")

    _consume(walk, directory, Consume)


def _consume(
    walk: Walk, directory: Path, task: type[ConsumerTask], on_fetch: Callable[[], None] = lambda: None
) -> None:
    class Source(WithDeadLetters):
        def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
            on_fetch()
            return super().fetch_transactions(batch_size, **extra)

    engine = create_engine(f"sqlite:///{directory / 'shop.db'}")
    letters, inbox = DeadLetters(engine), Inbox(engine)
    inbox.migrate()
    inbox.register(CONTRACT)
    stored: list[str] = []

    @event.listens_for(engine, "after_cursor_execute")
    def note(_: Any, __: Any, statement: str, *more: Any) -> None:
        if "INSERT INTO onceward_dead_letters" in statement:
            stored.append(statement)

    @event.listens_for(engine, "commit")
    def stop(_: Any) -> None:
        if stored:
            walk.stop()

    with SqliteConnector(directory / "queue.db", on_failure="dead_letter") as queue:
        queue.dispatch_transactions([MESSAGE])
        source = Source(queue, letters, consumer="charge")
        with walk:
            task({"source": source}, {"inbox": inbox}).consume_transactions(POLICY)
    engine.dispose()


WALKS: dict[str, Callable[[Walk, Path], None]] = {
    "plain SQLite": plain_sqlite,
    "contract": contract,
    "Redis asyncio": redis_asyncio,
    "dead letter": dead_letter,
}


def main(listed: str | None) -> None:
    logging.disable()
    print(f"{'':15}{'calls':>8}{'functions':>11}{'files':>7}{'switches':>10}")
    for name, run in WALKS.items():
        walks = [Walk() for _ in range(RUNS)]
        for each in walks:
            with tempfile.TemporaryDirectory() as directory:
                run(each, Path(directory))
        walk = min(walks, key=lambda each: len(each.calls))
        files = [file for file, _ in walk.calls]
        switches = sum(one != other for one, other in pairwise(files))
        print(f"{name:15}{len(files):>8}{len(set(walk.calls)):>11}{len(set(files)):>7}{switches:>10}")
        for file, function in walk.calls if name == listed else ():
            print(f"    {file}  {function}")


if __name__ == "__main__":
    main(sys.argv[2] if sys.argv[1:2] == ["--list"] else None)
