"""Cost per message in a long queue and beside many dedup rows, several workers against one, and memory over time.

python -m bench scale                                        small sizes, a minute
python -m bench.scale --messages 10000000 --rows 10000000    the sizes of the goals; minutes and gigabytes
python -m bench.scale --minutes 60                           memory of one worker, every minute
python -m bench.scale --minutes 60 --rate 50                 the same at 50 messages a second
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine

from bench.measure import Line
from onceward import Contract, Inbox, Transaction
from onceward.connectors.codec import encode
from onceward.connectors.postgresql.schema import BATCH as QUEUE_BATCH
from onceward.connectors.urls import Address
from onceward.inbox import Event
from onceward.testing.servers import postgres_server, redis_server
from onceward.transaction import Settlement, Verdict

MESSAGES, ROWS = 20_000, 20_000
SAMPLE = 2000
"""Messages that are taken and settled to measure the cost of one."""
FLAT = 1.5
"""How many times as much a message may cost in the long queue: both figures vary."""
BATCH = 1000
PROCESSES = 4
WORK = 40_000
RATE = 5000

APP = """
import os
from onceward import Onceward

app = Onceward("scale")


@app.consumer(os.environ["SCALE_URL"], contract=None)
def charge(order: dict) -> None:
    sum(range(200))
"""


def lines() -> Iterator[Line]:
    yield from measure(MESSAGES, ROWS)


def measure(messages: int, rows: int, only: str | None = None) -> Iterator[Line]:
    if only in (None, "sqlite"):
        with tempfile.TemporaryDirectory() as directory:
            yield _queue("SQLite", f"sqlite:///{directory}/orders.db?synchronous=NORMAL", messages)
            yield _rows("SQLite", f"sqlite:///{directory}/shop.db", rows)
    if only in (None, "postgresql"):
        with postgres_server() as server:
            joint = "&" if "?" in server.url else "?"
            yield _queue("PostgreSQL", f"{server.url}{joint}queue=orders", messages)
            yield _rows("PostgreSQL", server.url.replace("postgresql:", "postgresql+psycopg:", 1), rows)
    if only in (None, "processes"):
        yield _processes()


def _queue(name: str, url: str, messages: int) -> Line:
    """The time to take and settle messages, in a queue with none but those, and behind `messages` of them."""
    with Address(url).open(asynchronous=False) as connector:
        _send(connector, SAMPLE)
        empty = _take(connector)
        _load(url, messages)
        _send(connector, SAMPLE)
        full = _take(connector)
    return _flat(f"{name}: a message in a queue of {messages:,}; bare: of none", empty, full)


def _load(url: str, count: int) -> None:
    """Append copies of one message, as no sender could in the time."""
    body = encode(Transaction(payload={"number": 0}))
    place = url.partition("?")[0]
    if place.startswith("sqlite"):
        with closing(sqlite3.connect(place.removeprefix("sqlite:///"), isolation_level=None)) as file:
            file.execute("BEGIN IMMEDIATE")
            file.execute(
                "WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < ?) "
                "INSERT INTO messages (enqueued_at, body) SELECT ?, ? FROM s",
                (count, time.time(), body),
            )
            file.execute("UPDATE tallies SET appended = appended + ?", (count,))
            file.execute("COMMIT")
        return
    with psycopg.connect(
        url.replace("?queue=orders", "").replace("&queue=orders", ""), autocommit=True
    ) as server:
        batches = -(-count // QUEUE_BATCH)
        server.execute(
            "WITH first AS (SELECT nextval('onceward_queue_batches') AS batch) "
            "INSERT INTO onceward_queue_messages (queue, seq, enqueued_at, body) "
            "SELECT 'orders', batch * %s + n, %s, %s FROM first, generate_series(0, %s) AS s (n)",
            (QUEUE_BATCH, time.time(), body, count - 1),
        )
        server.execute(
            "SELECT setval('onceward_queue_batches', last_value + %s) FROM onceward_queue_batches", (batches,)
        )
        server.execute("INSERT INTO onceward_queue_log (queue, appended) VALUES ('orders', %s)", (count,))
        server.execute("VACUUM ANALYZE onceward_queue_messages")


def _send(connector: Any, count: int) -> None:
    for at in range(0, count, BATCH):
        batch = [Transaction(payload={"number": at + each}) for each in range(min(BATCH, count - at))]
        connector.dispatch_transactions(batch)


def _take(connector: Any) -> float:
    began = time.perf_counter()
    left = SAMPLE
    while left:
        taken = connector.fetch_transactions(min(100, left))
        connector.settle_transactions([Settlement(each, Verdict.DONE) for each in taken])
        left -= len(taken)
    return (time.perf_counter() - began) / SAMPLE * 1e6


def _rows(name: str, url: str, rows: int) -> Line:
    """The time to process an event beside few dedup rows, and beside many."""
    engine = create_engine(url)
    try:
        inbox = Inbox(engine)
        inbox.migrate()
        contract = Contract(
            consumer_id="scale", event_types=("*",), owner_team="bench", idempotency_mechanism="the inbox"
        )
        inbox.register(contract)
        few = _process(inbox, contract)
        _fill(engine, rows)
        many = _process(inbox, contract)
    finally:
        engine.dispose()
    return _flat(f"{name}: an event beside {rows:,} dedup rows; bare: few", few, many)


def _process(inbox: Inbox, contract: Contract) -> float:
    count = SAMPLE // 4
    events = [Event.of(Transaction(payload={"event_type": "scale", "number": each})) for each in range(count)]
    began = time.perf_counter()
    for event in events:
        inbox.process(contract, event, _do_nothing)
    return (time.perf_counter() - began) / count * 1e6


def _do_nothing(event: Event, session: Any) -> None:
    return None


def _fill(engine: Engine, rows: int) -> None:
    """Rows of other events with random ids, of today."""
    today = int(time.time()) // 86400
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql(
                f"WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}) "
                "INSERT INTO onceward_dedup "
                "(own_day, keep_day, consumer_id, tracking_id, payload_sha256, processed_at) "
                f"SELECT {today}, {today}, 'scale', hex(randomblob(16)), randomblob(32), {time.time()} FROM s"
            )
        else:
            connection.exec_driver_sql(
                "INSERT INTO onceward_dedup "
                "(event_day, own_day, processed_at, consumer_id, tracking_id, payload_sha256) "
                f"SELECT -1, {today}, now(), 'scale', gen_random_uuid()::text, sha256(n::text::bytea) "
                f"FROM generate_series(1, {rows}) AS s (n)"
            )


def _processes() -> Line:
    """The time for a message of `PROCESSES` worker processes, and of one: bare is one process."""
    with redis_server() as server:
        one, several = (_run(server.url, f"orders-{each}", each) for each in (1, PROCESSES))
    speed = one / several
    target = 1.5
    return Line(
        f"{PROCESSES} worker processes; bare: one",
        one,
        several,
        f"≥ {target:g} ×",
        speed >= target,
        f"{speed:.2f} ×",
    )


def _run(server: str, stream: str, processes: int) -> float:
    import redis

    url = f"{server}/{stream}"
    with Address(url).open(asynchronous=False) as connector:
        _send(connector, WORK)
    with redis.Redis.from_url(server) as client, _worker(url, processes):

        def done() -> int:
            groups = [each for each in client.xinfo_groups(stream) if each["name"] == b"onceward"]
            return sum((each["entries-read"] or 0) - each["pending"] for each in groups)

        while not (first := done()):
            time.sleep(0.005)
        began = time.perf_counter()
        while (last := done()) < WORK:
            time.sleep(0.005)
        return (time.perf_counter() - began) / max(last - first, 1) * 1e6


@contextmanager
def _worker(url: str, processes: int) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "scale_app.py").write_text(APP)
        process = subprocess.Popen(
            [sys.executable, "-m", "onceward", "run", "scale_app:app", "--processes", str(processes)],
            cwd=directory,
            env={**os.environ, "SCALE_URL": url, "PYTHONPATH": directory},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def watch_memory(minutes: float, rate: int) -> None:
    """Print the memory of a worker that gets `rate` messages a second, every minute."""
    with redis_server() as server:
        url = f"{server.url}/orders?maxlen=10000"
        with Address(url).open(asynchronous=False) as connector, _worker(url, 1) as process:
            until = time.monotonic() + minutes * 60
            minute = 0
            while time.monotonic() < until:
                print(f"minute {minute:3}: {_memory_of_children(process.pid):,} KiB", flush=True)
                minute += 1
                next_minute = time.monotonic() + 60
                while time.monotonic() < min(next_minute, until):
                    _send(connector, max(1, rate // 5))
                    time.sleep(0.2)


def _memory_of_children(parent: int) -> int:
    children = subprocess.run(
        ["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False
    ).stdout
    total = 0
    for child in children.split():
        status = Path(f"/proc/{child}/status").read_text()
        total += int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    return total


def _flat(what: str, before: float, after: float) -> Line:
    return Line(what, before, after, f"≤ {FLAT:g} ×", after <= before * FLAT, f"{after / before:.2f} ×")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--messages", type=int, default=MESSAGES, help="in the queue (default %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="dedup rows (default %(default)s)")
    parser.add_argument("--only", choices=("sqlite", "postgresql", "processes"), help="only this part")
    parser.add_argument("--minutes", type=float, help="only watch the memory of a worker for so long")
    parser.add_argument(
        "--rate", type=int, default=RATE, help="messages a second for --minutes (default %(default)s)"
    )
    given = parser.parse_args()
    if given.minutes:
        watch_memory(given.minutes, given.rate)
        return
    for line in measure(given.messages, given.rows, given.only):
        print(
            f"{line.what:<64}{line.bare:>9.1f} {line.ours:>9.1f} µs  {line.shown:>8}  {line.target}",
            flush=True,
        )


if __name__ == "__main__":
    main()
