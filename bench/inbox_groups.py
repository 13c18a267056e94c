"""Effects once per second under an app's policy, against hand-written loops: one commit each, and 100 per commit.

All take their messages from Redis, 100 at a time, and acknowledge them with one XACK. Each message is a dedup row and
one insert.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import redis

from bench.measure import Line
from onceward import Onceward
from onceward.app.build import open_task, open_task_async
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.inbox import Contract
from onceward.testing.servers import postgres_server, redis_server
from onceward.transaction import Transaction

COUNT = 2000
BATCH = 100
ROUNDS = 3
POLICY = {
    "loop": {"streaming": False, "mode": "continuous", "batch": {"size": 100}, "concurrency": {"value": 8}}
}
CREATE = (
    "CREATE TABLE orders (id TEXT PRIMARY KEY, total INTEGER)",
    "CREATE TABLE seen (consumer TEXT, id TEXT, PRIMARY KEY (consumer, id))",
)
ORDER = "INSERT INTO orders (id, total) VALUES (:id, :total)"
numbers = itertools.count()
_decode = msgspec.msgpack.decode


class Order(msgspec.Struct):
    id: str
    total: int


def lines() -> Iterator[Line]:
    with redis_server() as server:
        for name, database, share in (("SQLite", _sqlite, 0.4), ("PostgreSQL", _postgresql, 0.6)):
            with database() as (url, by_hand):
                yield from _on(name, url, by_hand, server.url, share)


def _on(
    name: str, url: str, by_hand: Callable[[str, int], float], source: str, share: float
) -> Iterator[Line]:
    one, hundred = partial(by_hand, source, 1), partial(by_hand, source, BATCH)
    together, each = _in_turn(source, COUNT, hundred, one)
    yield Line(
        f"{name}, by hand: one commit each / 100", together, each, "", True, f"{each / together:.1f} ×"
    )
    for commit in ("each", "group"):
        for kind in ("threads", "asyncio"):
            app = _app(url, f"{source}/orders", commit, kind)
            together, ours = _in_turn(source, COUNT, hundred, partial(_consume, app, COUNT))
            target, met = (f"≥ {share} ×", together / ours >= share) if commit == "group" else ("", True)
            what = f"effects once, {name}, {kind}, commit={commit}"
            yield Line(what, together, ours, target, met, f"{together / ours:.2f} ×")


def _in_turn(source: str, count: int, *consume: Callable[[], float]) -> list[float]:
    """Microseconds per message, the best of each, of what they return: the seconds that it took."""
    best = [float("inf")] * len(consume)
    for _, (number, call) in itertools.product(range(ROUNDS), enumerate(consume)):
        with RedisStreamsConnector(source, "orders") as sink:
            ids = [f"order-{next(numbers)}" for _ in range(count)]
            sink.dispatch_transactions(
                [Transaction(id=each, payload={"id": each, "total": 7}) for each in ids]
            )
        gc.collect()
        best[number] = min(best[number], call() / count * 1e6)
        with redis.Redis.from_url(source) as client:
            client.delete("orders")
    return best


def _app(url: str, source: str, commit: Any, kind: str) -> Onceward:
    app = Onceward("bench", database=url)
    contract = Contract(
        consumer_id="orders", event_types=["*"], owner_team="bench", idempotency_mechanism="inbox"
    )

    if kind == "threads":

        @app.consumer(source, contract=contract, policy=POLICY, commit=commit)
        def book(order: Order, session: Any) -> None:
            session.execute(ORDER, {"id": order.id, "total": order.total})

    else:

        @app.consumer(source, contract=contract, policy=POLICY, commit=commit, name="book")
        async def book_async(order: Order, session: Any) -> None:
            await session.execute(ORDER, {"id": order.id, "total": order.total})

    return app


def _consume(app: Onceward, count: int) -> float:
    """As a worker of `onceward run` does, until the queue is empty."""
    consumer = app.consumers["book"]

    async def consume_async() -> float:
        done = seconds = 0.0
        async with open_task_async(app, consumer) as task:
            task.interruptible = True
            while done < count:  # on a busy machine a lock may take too long, and a message comes back later
                report = await task.consume_transactions(consumer.policy)
                done, seconds = done + report.succeeded, seconds + report.duration
        return seconds

    if consumer.asynchronous:
        return asyncio.run(consume_async())
    done = seconds = 0.0
    with open_task(app, consumer) as task:
        task.interruptible = True
        while done < count:
            report = task.consume_transactions(consumer.policy)
            done, seconds = done + report.succeeded, seconds + report.duration
    return seconds


def _read(client: Any) -> list[tuple[bytes, Order]]:
    found = client.xreadgroup("bench", "me", {"orders": ">"}, count=BATCH)
    entries = found[0][1] if found else []
    return [(entry, msgspec.convert(_decode(fields[b"body"])[2], Order)) for entry, fields in entries]


@contextmanager
def _sqlite() -> Iterator[tuple[str, Callable[[str, int], float]]]:
    with tempfile.TemporaryDirectory(prefix="onceward-") as directory:
        path = Path(directory, "bench.db")
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        for table in CREATE:
            connection.execute(table)

        def by_hand(source: str, together: int) -> float:
            return _by_hand(source, together, connection.execute, "?", "BEGIN IMMEDIATE")

        yield f"sqlite:///{path}", by_hand
        connection.close()


@contextmanager
def _postgresql() -> Iterator[tuple[str, Callable[[str, int], float]]]:
    with postgres_server() as server, psycopg.connect(server.url, autocommit=True) as connection:
        for table in CREATE:
            connection.execute(table)

        def by_hand(source: str, together: int) -> float:
            return _by_hand(source, together, connection.execute, "%s", "BEGIN")

        yield server.url, by_hand


def _by_hand(source: str, together: int, execute: Any, mark: str, begin: str) -> float:
    client = redis.Redis.from_url(source)
    client.xgroup_create("orders", "bench", "0", mkstream=True)
    seen = f"INSERT INTO seen VALUES ({mark}, {mark}) ON CONFLICT DO NOTHING"
    order = f"INSERT INTO orders VALUES ({mark}, {mark})"
    began = time.perf_counter()
    while batch := _read(client):
        for first in range(0, len(batch), together):
            execute(begin)
            for _, each in batch[first : first + together]:
                if execute(seen, ("by-hand", each.id)).rowcount == 1:
                    execute(order, (each.id, each.total))
            execute("COMMIT")
        client.xack("orders", "bench", *[entry for entry, _ in batch])
    took = time.perf_counter() - began
    client.close()
    return took
