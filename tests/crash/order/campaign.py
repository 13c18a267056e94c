"""Processes that keep order, killed with -9 while they work through a backlog, and what their handlers did."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import create_engine, text

from onceward.connectors.urls import Address
from onceward.transaction import Transaction
from tests.support import ROOT
from tests.support.wait import until


class Runs(NamedTuple):
    """Of handlers: more than there are events, since some fail once, and some are cut off."""

    begun: int
    cut_off: int


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
    patience: float = 120.0,
    seed: int = 3,
) -> Runs:
    """Raises `AssertionError` unless each event had its effect once, in its order, and never two of a key at once."""
    chance = random.Random(seed)
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://", 1))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE charges (customer text, number integer)"))
    sent = _send(source, chance, keys, events)
    running: list[Any] = []
    killed: dict[int, int] = {}

    def start() -> None:
        command = [sys.executable, "-m", "tests.crash.order.worker", database, source, str(log)]
        with log.with_suffix(".err").open("ab") as errors:
            running.append(subprocess.Popen(command, cwd=ROOT, stderr=errors))

    def done() -> int:
        with engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM charges")).scalar_one())

    try:
        for _ in range(processes):
            start()
        for number in range(kills):
            goal = events * (number + 1) // (kills + 2)
            until(lambda goal=goal: done() >= goal, patience)
            victim = running.pop(0)
            victim.kill()
            victim.wait()
            killed[victim.pid] = time.monotonic_ns()
            after_kill()
            start()
        until(lambda: done() >= events, patience)
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
    return check(log, killed)


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


def check(log: Path, killed: dict[int, int]) -> Runs:
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
    return Runs(sum(map(len, runs.values())), len(open_))
