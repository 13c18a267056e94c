"""Run onceward and its peers in turn on the same server, and print a table."""

from __future__ import annotations

import argparse
import logging
import subprocess
from pathlib import Path

from sqlalchemy import create_engine, text

from bench.peers.on_onceward import consume
from onceward.testing.servers import postgres_server

HERE = Path(__file__).parent
ON_POSTGRESQL = ("procrastinate", "pgqueuer")
CONCURRENCY = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.postgresql", description=__doc__)
    parser.add_argument("--python", required=True, help="the Python of the environment that has the peers")
    parser.add_argument("--count", type=int, default=2000, help="messages in each round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    best: dict[str, float] = {}
    for _ in range(given.rounds):
        for peer in ("onceward", *ON_POSTGRESQL):
            best[peer] = max(best.get(peer, 0.0), _on_postgresql(peer, given.python, given.count))
    print(
        f"PostgreSQL queue, {given.count} messages, one insert each, {CONCURRENCY} at once; best of {given.rounds}\n"
    )
    for peer, rate in best.items():
        effects = "once: record, effect and removal in one commit" if peer == "onceward" else "at least once"
        print(f"{peer:<16}{rate:>8.0f}/s   {best['onceward'] / rate:>5.2f} ×   {effects}")


def _on_postgresql(peer: str, python: str, count: int) -> float:
    """Messages a second, on a new server."""
    with postgres_server() as server:
        engine = create_engine(server.url.replace("postgresql://", "postgresql+psycopg://", 1))
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (id TEXT, total INTEGER)"))
        try:
            if peer == "onceward":
                rate = consume(engine, server.url, count, CONCURRENCY)
            else:
                command = [python, str(HERE / f"on_{peer}.py"), server.url, str(count), str(CONCURRENCY)]
                ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
                rate = float(ended.stdout.split()[-1])
            with engine.connect() as connection:
                done = connection.execute(text("SELECT count(DISTINCT id) FROM orders")).scalar_one()
            assert done == count, f"{peer} did {done} of {count}"
            return rate
        finally:
            engine.dispose()


if __name__ == "__main__":
    main()
