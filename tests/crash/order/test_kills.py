"""Processes of sixteen slots, killed with -9 again and again: each key in its order, never two at once."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from onceward.connectors.urls import Address
from onceward.testing.servers import redis_server
from onceward.transaction import Transaction
from tests.support import ROOT
from tests.support.schema import new_schema
from tests.support.wait import until


@pytest.fixture(params=["sqlite", pytest.param("named", marks=pytest.mark.long), "postgresql", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    settings = "lease=2&redelivery_delay=0.05"
    if request.param == "postgresql":
        with new_schema(request.getfixturevalue("postgres_url")) as schema:
            yield schema.plain_url, f"{schema.plain_url}&queue=orders&{settings}"
        return
    if request.param == "redis":
        with redis_server() as server:
            yield f"sqlite:///{tmp_path}/shop.db", f"{server.url}/orders?{settings}"
        return
    queue = "shop.db?queue=orders" if request.param == "named" else "orders.db?synchronous=OFF"
    yield f"sqlite:///{tmp_path}/shop.db", f"sqlite:///{tmp_path}/{queue}&{settings}"


@pytest.mark.req("OR-01", "OR-02")
@pytest.mark.parametrize(
    ("keys", "events", "processes", "kills"),
    [(40, 300, 3, 2), pytest.param(1000, 4000, 4, 12, marks=pytest.mark.long)],
)
def test_order_survives_kills(
    place: tuple[str, str], tmp_path: Path, keys: int, events: int, processes: int, kills: int
) -> None:
    database, source = place
    log = tmp_path / "log.txt"
    campaign(database, source, log, keys=keys, events=events, processes=processes, kills=kills)


@pytest.mark.long
@pytest.mark.req("OR-02")
def test_order_survives_kills_of_redis(tmp_path: Path) -> None:
    with redis_server(durable=True) as server:
        database, source = (
            f"sqlite:///{tmp_path}/shop.db",
            f"{server.url}/orders?lease=2&redelivery_delay=0.05",
        )

        def restart() -> None:
            server.kill()
            server.start()

        log = tmp_path / "log.txt"
        campaign(database, source, log, keys=60, events=1500, processes=4, kills=4, after_kill=restart)


def campaign(
    database: str,
    source: str,
    log: Path,
    *,
    keys: int,
    events: int,
    processes: int,
    kills: int,
    after_kill: Callable[[], None] = lambda: None,
) -> None:
    chance = random.Random(3)
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://", 1))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE charges (customer text, number integer)"))
    sent = _send(source, chance, keys, events)
    running: list[Any] = []
    killed: dict[int, int] = {}

    def start() -> None:
        command = [sys.executable, "-m", "tests.crash.order.worker", database, source, str(log)]
        running.append(subprocess.Popen(command, cwd=ROOT))

    def done() -> int:
        with engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM charges")).scalar_one())

    try:
        for _ in range(processes):
            start()
        for number in range(kills):
            goal = events * (number + 1) // (kills + 2)
            until(lambda goal=goal: done() >= goal, 120)
            victim = running.pop(0)
            victim.kill()
            victim.wait()
            killed[victim.pid] = time.monotonic_ns()
            after_kill()
            start()
        until(lambda: done() >= events, 120)
    finally:
        for each in running:
            each.kill()
            each.wait()
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT customer, count(*), count(DISTINCT number) FROM charges GROUP BY 1")
        )
        assert {row[0]: (row[1], row[2]) for row in found} == {key: (n, n) for key, n in sent.items()}
    engine.dispose()
    check(log, killed)


def _send(source: str, chance: random.Random, keys: int, events: int) -> dict[str, int]:
    sent: dict[str, int] = defaultdict(int)
    made = []
    for _ in range(events):
        key = f"k{chance.randrange(keys)}"
        sent[key] += 1
        made.append(Transaction(payload={"customer": key, "number": sent[key]}))
    queue = Address(source).open(asynchronous=False)
    for first in range(0, events, 500):
        queue.dispatch_transactions(made[first : first + 500])
    queue.close()
    return sent


def check(log: Path, killed: dict[int, int]) -> None:
    """Each run of a handler ends before the next one of its key begins, and their numbers never go back."""
    open_: dict[tuple[str, int, int], int] = {}
    runs: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for line in log.read_text().splitlines():
        what, key, number, process, at = line.split()
        run = key, int(number), int(process)
        if what == "begin":
            open_[run] = int(at)
        else:
            runs[key].append((open_.pop(run), int(at), int(number)))
    for (key, number, process), began in open_.items():
        runs[key].append((began, killed.get(process, began), number))
    for key, each in runs.items():
        each.sort()
        for (_, ended, before), (began, _, after) in pairwise(each):
            assert ended <= began, f"two events of {key} at once: {before} and {after}"
            assert before <= after, f"{after} of {key} ran after {before}"
