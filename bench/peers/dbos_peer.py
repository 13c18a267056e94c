"""DBOS, whose queue is its own database: here SQLite, so no Redis is involved."""

from __future__ import annotations

import os
import sys
import time

from dbos import DBOS, Queue

from bench.peers.sink import note

DBOS(config={"name": "peers", "system_database_url": os.environ.get("PEER_DATABASE", "sqlite:///peers.db")})
queue = Queue("peers", concurrency=8)


@DBOS.workflow()
def handle(sent_at: float) -> None:
    note(sent_at)


def send_one(url, count):
    DBOS.launch()
    for _ in range(count):
        queue.enqueue(handle, time.time())
    DBOS.destroy()


send_many = send_one


def worker(url):
    code = "import time; from bench.peers.dbos_peer import DBOS; DBOS.launch(); time.sleep(3600)"
    return [sys.executable, "-c", code]
