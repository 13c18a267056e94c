"""Several processes that take starts and slots as fast as they can, and note each in the database.

`python -m tests.support.limits URL SCOPE RATE CONCURRENCY STARTS SEED`
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from typing import Any

from sqlalchemy import Engine, create_engine, text

from onceward._sync import run_blocking
from onceward.inbox import Inbox
from onceward.limits import Limit
from onceward.limits.records import LimitRecords, Wish
from onceward.storage.database import BlockingStoragePorts, Sql
from tests.support.processes import processes

KEYS = ("a", "b", "c")


@contextmanager
def engine_of(url: str) -> Iterator[Engine]:
    engine = create_engine(url, connect_args={"timeout": 60} if url.startswith("sqlite") else {})
    yield engine
    engine.dispose()


def records_on(engine: Engine, limit: Limit, scope: str = "shop", **more: Any) -> LimitRecords:
    return LimitRecords(BlockingStoragePorts(engine), scope, limit, **more)


def prepare(engine: Engine) -> None:
    Inbox(engine).migrate()
    kind = "REAL" if engine.dialect.name == "sqlite" else "double precision"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE starts (key TEXT, due {kind})"))
        connection.execute(text("CREATE TABLE most (key TEXT, busy INTEGER)"))


def hammer(url: str, scope: str, rate: str, concurrency: int, starts: int, seed: int) -> None:
    """Take starts until there are this many of them, and hold slots for a moment."""
    limit = Limit(rate=rate if rate != "-" else None, concurrency=concurrency or None, by="key")
    chance, done = Random(seed), 0
    with engine_of(url) as engine:
        records, rows = records_on(engine, limit, scope), Sql(engine.dialect.name)
        ports = records.ports
        run_blocking(records.begin())
        held: dict[str, float | None] = {}

        def take() -> int:
            wishes = {key: Wish(chance.randint(1, 12), 0) for key in chance.sample(KEYS, 2)}
            freed = dict.fromkeys(chance.sample(sorted(held), len(held) // 2), 0.001)
            states = run_blocking(records.take(wishes, 20, freed))
            for token in freed:
                del held[token]
            grants = [grant for state in states.values() for grant in state.grants]
            held.update({grant.token: None for grant in grants if grant.token is not None})

            def note(transaction: Any) -> None:
                rows.many(
                    transaction,
                    "INSERT INTO starts (key, due) VALUES (:key, :due)",
                    [{"key": grant.key, "due": grant.due_at} for grant in grants],
                )
                rows.run(
                    transaction,
                    "INSERT INTO most SELECT key, count(*) FROM onceward_limit_slots WHERE scope = :scope GROUP BY key",
                    scope=scope,
                )

            run_blocking(ports.transact(note))
            return len(grants)

        while done < starts:
            done += take()
        run_blocking(records.free(held))


def hammer_together(url: str, scope: str, rate: str, concurrency: int, starts: int, count: int = 3) -> None:
    with processes() as start:
        arguments = [url, scope, rate, str(concurrency), str(starts // count)]
        running: list[subprocess.Popen[str]] = [
            start([sys.executable, "-m", "tests.support.limits", *arguments, str(seed)])
            for seed in range(count)
        ]
        for process in running:
            assert process.wait(3600) == 0


def closest(times: list[float]) -> float:
    """Seconds between the two that are closest."""
    return min(after - before for before, after in pairwise(sorted(times)))


if __name__ == "__main__":
    place, own, per, slots, wanted, number = sys.argv[1:]
    hammer(place, own, per, int(slots), int(wanted), int(number))
