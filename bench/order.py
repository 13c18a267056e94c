"""What order by key costs: events per second with and without `order_by`, and with a key that is stuck.

One process of 16 slots, ten times as many keys, and a backlog that is twice what is measured: a rate, without the end,
when only a few keys are left. The stuck key has as many events as are measured, which wait behind one that another
process holds. Another process has lined them up before: it is measured what they cost while they wait, not once. The
same process has been there before a run without a stuck key, too.

Each round runs the others without and with the stuck key, and the same in reverse. The cost is the median of the
rounds; beside it is the noise: how much the two runs without a stuck key in one round differ.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from uuid import uuid4

from bench.measure import Line
from onceward import Contract, Onceward
from onceward.app.build import open_task
from onceward.connectors.urls import Address
from onceward.testing.servers import postgres_server, redis_server
from onceward.transaction import Transaction

EVENTS = 3000
SLOTS = 16
ROUNDS = 9
POLICY = {
    "loop": {
        "streaming": False, "mode": "continuous", "batch": {"size": 100}, "concurrency": {"value": SLOTS},
        "limit": EVENTS,
    }
}  # fmt: skip


def lines() -> Iterator[Line]:
    for name, place in (("SQLite", _sqlite), ("PostgreSQL", _postgresql), ("Redis", _redis)):
        with place() as new:
            for how in ("plain", "ordered", "stuck"):
                _run(*new(), how)  # to warm up
            took: list[list[float]] = [
                [_run(*new(), how) for how in ("plain", "ordered", "stuck", "stuck", "ordered")]
                for _ in range(ROUNDS)
            ]
        plain, ordered = min(each[0] for each in took), min(min(each[1], each[4]) for each in took)
        share = plain / ordered
        yield Line(
            f"{name}: no order / order_by, 160 keys", plain, ordered, "≥ 80 %", share >= 0.8, f"{share:.0%}"
        )
        without = median((each[1] + each[4]) / 2 for each in took)
        cost = median((each[2] + each[3]) / (each[1] + each[4]) for each in took) - 1
        noise = median(abs(each[4] / each[1] - 1) for each in took)
        yield Line(
            f"{name}: order_by / one key stuck",
            without,
            without * (1 + cost),
            "≤ 1 %",
            cost <= 0.01,
            f"{cost:+.1%} ±{noise:.1%}",
        )


def _run(database: str, source: str, how: str) -> float:
    """Microseconds per event."""
    app = Onceward("bench", database=database)
    contract = Contract(
        consumer_id=uuid4().hex, event_types=["*"], owner_team="bench", idempotency_mechanism="inbox"
    )
    order_by = None if how == "plain" else "key"

    @app.consumer(source, contract=contract, policy=POLICY, order_by=order_by)
    def book(event: dict[str, Any], session: Any) -> None:
        session.execute("SELECT 1")

    queue = Address(source).open(asynchronous=False)
    chance = random.Random(5)
    if how != "plain":
        queue.keep_order(lambda transaction: str(transaction.payload["key"]), hold_dead=True)
        if how == "stuck":
            queue.dispatch_transactions([Transaction(payload={"key": "stuck"}) for _ in range(EVENTS)])
            assert len(queue.fetch_transactions(EVENTS)) == 1
        assert not queue.fetch_transactions(EVENTS)  # it has lined up all
    queue.dispatch_transactions(
        [Transaction(payload={"key": chance.randrange(10 * SLOTS)}) for _ in range(2 * EVENTS)]
    )
    queue.close()
    gc.collect()
    with open_task(app, app.consumers["book"]) as task:
        began = time.perf_counter()
        report = task.consume_transactions(app.consumers["book"].policy)
        took = time.perf_counter() - began
    assert report.succeeded == EVENTS, (how, report)
    return took / EVENTS * 1e6


@contextmanager
def _sqlite() -> Iterator[Callable[[], tuple[str, str]]]:
    with tempfile.TemporaryDirectory() as directory:

        def new() -> tuple[str, str]:
            name = f"sqlite:///{directory}/{uuid4().hex}"
            return f"{name}.db", f"{name}-queue.db"

        yield new


@contextmanager
def _redis() -> Iterator[Callable[[], tuple[str, str]]]:
    with redis_server() as server, _sqlite() as beside:
        yield lambda: (beside()[0], f"{server.url}/{uuid4().hex}")


@contextmanager
def _postgresql() -> Iterator[Callable[[], tuple[str, str]]]:
    with postgres_server() as server:
        yield lambda: (server.url, f"{server.url}{'&' if '?' in server.url else '?'}queue=q{uuid4().hex}")
