"""An attack on order: a thousand keys, four processes of sixteen slots, killed with -9 again and again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onceward.testing.servers import postgres_server, redis_server
from tests.crash.order.campaign import campaign

ORDERED = ("sqlite", "postgresql", "redis")
KEYS, PROCESSES = 1000, 4
PATIENCE = 600.0
"""Seconds between two kills, at most."""
_SETTINGS = "lease=2&redelivery_delay=0.05"


def attack_order(source: str, *, events: int, kills: int, seed: int) -> bool:
    """Whether each event had its effect once, in the order of its key, and never two of a key at once."""
    print(
        f"\norder on {source}: {events} events of {KEYS} keys, {PROCESSES} processes, seed {seed}", flush=True
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, _place(source, Path(directory)) as (database, queue):
        log = Path(directory) / "log.txt"
        try:
            runs = campaign(
                database, queue, log, keys=KEYS, events=events, processes=PROCESSES, kills=kills, patience=PATIENCE,
                seed=seed,
            )  # fmt: skip
        except AssertionError as error:
            print(f"  {error}")
            return False
    print(
        f"  {kills} kills in {time.monotonic() - began:.0f} s; {runs.begun} runs, {runs.cut_off} of them cut off; "
        "0 overlaps, 0 out of order, 0 lost, 0 doubled"
    )
    return True


@contextmanager
def _place(source: str, directory: Path) -> Iterator[tuple[str, str]]:
    """A database, and a queue."""
    if source == "postgresql":
        with postgres_server() as server:
            both = "&" if "?" in server.url else "?"
            yield server.url, f"{server.url}{both}queue=orders&{_SETTINGS}"
    elif source == "redis":
        with redis_server() as server:
            yield f"sqlite:///{directory}/shop.db", f"{server.url}/orders?{_SETTINGS}"
    else:
        yield f"sqlite:///{directory}/shop.db", f"sqlite:///{directory}/orders.db?{_SETTINGS}"
