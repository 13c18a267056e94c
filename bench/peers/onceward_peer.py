"""onceward, with the defaults of an app, without a contract."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from bench.peers.sink import note
from onceward import Onceward

app = Onceward("peers")


@app.consumer(f"{os.environ.get('PEER_URL', 'redis://localhost')}/onceward", contract=None)
def handle(message: dict[str, Any]) -> None:
    note(message["sent_at"])


def send_one(url: str, count: int) -> None:
    for _ in range(count):
        handle.send({"sent_at": time.time()})


def send_many(url: str, count: int) -> None:
    handle.send_many({"sent_at": time.time()} for _ in range(count))


def worker(url: str) -> list[str]:
    return [sys.executable, "-m", "onceward", "run", "bench.peers.onceward_peer:app"]
