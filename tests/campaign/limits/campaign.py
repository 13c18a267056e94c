"""A campaign against limits: a million starts by processes that are killed, and a rate over minutes.

The first part counts in the database: no key ever has more slots than its limit, no two starts of a key are closer than
its rate, and once the leases of killed processes are over, every slot can be had again. The second runs a limited
consumer in three workers, and counts what its handler began in each minute.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from onceward._sync import run_blocking
from onceward.connectors import SqliteConnector
from onceward.limits.records import LEASE, Wish
from onceward.transaction import Transaction
from tests.campaign.limits.starter import AT_ONCE, KEYS, LIMIT, SCOPE
from tests.support.limits import engine_of, prepare, records_on
from tests.support.own_postgres import own_postgres

STARTERS = 3
WORKERS = 3
RATE = 50
"""Starts a second, in the second part."""
MINUTES = 2
TOLERANCE = 0.01
SHOP = f"""
import os
import time

from onceward import Limit, Onceward

app = Onceward("shop", database=os.environ["SHOP_DATABASE"])
log = os.open("log.txt", os.O_APPEND | os.O_CREAT | os.O_WRONLY)


@app.consumer("sqlite:///orders.db", contract=None, limit=Limit(rate="{RATE}/s"))
def charge(order: dict) -> None:
    os.write(log, f"{{time.monotonic()}} {{os.getpid()}}\\n".encode())
"""


def attack_limits(*, starts: int, kills: int, seed: int) -> bool:
    """Returns whether nothing is wrong, and prints what is."""
    with own_postgres() as server, tempfile.TemporaryDirectory(prefix="onceward-limits-") as directory:
        with engine_of(server.url) as engine:
            prepare(engine)
            fine = _check_starts(engine, server.url, starts, kills, random.Random(seed))
        return _check_minutes(server.url, Path(directory)) and fine


# ── a million starts ────────────────────────────────────────────────────────────────────────────────────


def _check_starts(engine: Engine, url: str, starts: int, kills: int, chance: random.Random) -> bool:
    print(f"\n{starts:,} starts of {len(KEYS)} keys, {LIMIT}, by {STARTERS} processes", flush=True)
    began = time.monotonic()
    with _starters(url, chance) as kill:
        done = number = 0
        while done < starts:
            time.sleep(1.0)
            [done] = _ask(engine, "SELECT count(*) FROM starts")
            if number < kills and done >= starts * (number + 1) / (kills + 1):
                kill()
                number += 1
    took = time.monotonic() - began
    most = _ask(engine, "SELECT max(busy) FROM most")[0]
    early = sum(_too_close(_ask(engine, f"SELECT due FROM starts WHERE key = '{key}'")) for key in KEYS)
    left = _ask(engine, "SELECT count(*) FROM onceward_limit_slots")[0]
    time.sleep(LEASE + 0.5)
    records = records_on(engine, LIMIT, SCOPE)
    wishes = dict.fromkeys(KEYS, Wish(AT_ONCE, 0))
    states = run_blocking(records.take(wishes, len(KEYS) * AT_ONCE, {}))
    leaked = sum(AT_ONCE - len(state.grants) for state in states.values())
    print(
        f"  {done:,} starts in {took:.0f} s, {number + STARTERS} processes killed with -9\n"
        f"  most slots of a key {most} of {AT_ONCE}; starts too early {early}; "
        f"{left} slots were held by killed processes, {leaked} leaked"
    )
    return bool(most <= AT_ONCE and not early and not leaked)


@contextmanager
def _starters(url: str, chance: random.Random) -> Iterator[Callable[[], None]]:
    """Processes that start; yields what kills one of them, and starts another."""

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.campaign.limits.starter", url, str(chance.randrange(1 << 30))]
        return subprocess.Popen(command)

    running = [start() for _ in range(STARTERS)]

    def kill() -> None:
        victim = running.pop(chance.randrange(len(running)))
        victim.kill()
        if victim.wait() != -signal.SIGKILL:
            raise RuntimeError(f"a starter ended by itself, with {victim.returncode}")
        running.append(start())

    try:
        yield kill
    finally:
        for each in running:
            each.kill()
            each.wait()


def _too_close(times: list[float]) -> int:
    every = LIMIT.every * (1 - 1e-3)  # of what a double can tell apart in 2038
    return sum(after - before < every for before, after in pairwise(sorted(times)))


def _ask(engine: Engine, query: str) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text(query)).scalars())


# ── minutes of a rate ───────────────────────────────────────────────────────────────────────────────────


def _check_minutes(database: str, directory: Path) -> bool:
    print(f"\n{RATE}/s in {WORKERS} workers, for {MINUTES} minutes", flush=True)
    (directory / "shop.py").write_text(SHOP)
    with ExitStack() as stack:
        queue = stack.enter_context(SqliteConnector(directory / "orders.db"))
        orders = RATE * 60 * (MINUTES + 1)
        queue.dispatch_transactions([Transaction(payload={"number": number}) for number in range(orders)])
        run = subprocess.Popen(
            [sys.executable, "-m", "onceward", "run", "shop:app", "--processes", str(WORKERS)],
            cwd=directory,
            env={**os.environ, "SHOP_DATABASE": database},
            stderr=stack.enter_context((directory / "run.log").open("wb")),
        )
        stack.callback(run.wait)
        stack.callback(run.terminate)
        while len({pid for _, pid in _log(directory)}) < WORKERS:
            if run.poll() is not None:
                print((directory / "run.log").read_text())
                return False
            time.sleep(0.5)
        first = time.monotonic()
        time.sleep(60 * MINUTES + 2)
    times = [at for at, _ in _log(directory)]
    counts = [
        sum(first + 60 * minute <= each < first + 60 * (minute + 1) for each in times)
        for minute in range(MINUTES)
    ]
    errors = [count / (RATE * 60) - 1 for count in counts]
    print(
        "  "
        + ", ".join(f"{count} starts ({error:+.2%})" for count, error in zip(counts, errors, strict=True))
    )
    return all(abs(error) <= TOLERANCE for error in errors)


def _log(directory: Path) -> list[tuple[float, int]]:
    """When each handler began, and in which process."""
    path = directory / "log.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), int(pid)) for at, pid in map(str.split, lines)]
