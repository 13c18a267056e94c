"""`charge.send` where another send is under way."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from onceward.connectors.urls import Address

INTERRUPTED = """
import os, signal, sqlite3, sys, threading, time
from urllib.parse import urlsplit
from onceward import Onceward

kind, url = sys.argv[1:]
app = Onceward("shop")

@app.consumer(url)
def charge(order: int) -> None: ...

charge.send(1)
if kind == "sqlite":
    other = sqlite3.connect(urlsplit(url).path[1:], isolation_level=None, check_same_thread=False)
    hold, let_go = (lambda: other.execute("BEGIN IMMEDIATE")), (lambda: other.execute("ROLLBACK"))
else:
    import redis
    other = redis.Redis.from_url(url.rpartition("/")[0])
    hold, let_go = (lambda: other.client_pause(60_000, all=False)), other.client_unpause

def on_signal(*_):
    let_go()
    charge.send(3)

signal.signal(signal.SIGUSR1, on_signal)
hold()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
charge.send(2)  # waits until the handler of the signal lets go
threads = [threading.Thread(target=charge.send, args=(number,)) for number in (4, 5)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


@pytest.mark.req("SE-02")
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_signal_handler_sends_while_its_thread_sends(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    if kind == "redis":
        url = f"{request.getfixturevalue('redis_url')}/{uuid.uuid4().hex}"
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, kind, url],
        check=False,
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Address(url).open(asynchronous=False) as connector:
        assert sorted(each.payload for each in connector.fetch_transactions(10)) == [1, 2, 3, 4, 5]
