"""`charge.send` where another send is under way: in a signal handler, in a child forked meanwhile, in other tasks."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from onceward import Onceward
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


FORKED = """
import os, sys, threading, time
from onceward import Onceward

module, url = sys.argv[1:]
app = Onceward("shop")

@app.consumer(url)
def charge(order: int) -> None: ...

class SlowImport:
    begun = threading.Event()

    def find_spec(self, name, *_):
        if name == module and threading.current_thread() is first:
            self.begun.set()
            time.sleep(0.5)

first = threading.Thread(target=charge.send, args=(1,))
assert module not in sys.modules
sys.meta_path.insert(0, SlowImport())
first.start()
assert SlowImport.begun.wait(20)
child = os.fork()
charge.send(2 if child else 3)
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
first.join()
"""


@pytest.mark.req("SE-03")
@pytest.mark.parametrize(
    "module", ["onceward.app.send.sender", "onceward.connectors.redis_streams.connector"]
)
def test_a_child_that_is_forked_during_the_first_send_sends(module: str, redis_url: str) -> None:
    url = f"{redis_url}/{uuid.uuid4().hex}"
    done = subprocess.run(
        # Python 3.12 and later warn of any fork with threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, module, url],
        check=False, capture_output=True, text=True, timeout=40,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    with Address(url).open(asynchronous=False) as connector:
        assert sorted(each.payload for each in connector.fetch_transactions(10)) == [1, 2, 3]


FORKED_BETWEEN = """
import os, sys, threading, time
from onceward.connectors.kept import kept
from onceward.connectors.urls import Address

first, second = map(Address, sys.argv[1:])
kept.take(first)
begun = threading.Event()

class SlowAddress(Address):
    def open(self, *, asynchronous):
        begun.set()
        time.sleep(0.5)
        return super().open(asynchronous=asynchronous)

opening = threading.Thread(target=kept.take, args=(SlowAddress(sys.argv[2]),))
opening.start()
assert begun.wait(20)
child = os.fork()
kept.take(first), kept.take(second)
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
opening.join()
"""


@pytest.mark.req("SE-03")
def test_a_fork_and_a_thread_that_opens_a_second_queue_do_not_wait_for_each_other(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED_BETWEEN,
         f"sqlite:///{tmp_path}/one.db", f"sqlite:///{tmp_path}/two.db"],
        check=False, capture_output=True, text=True, timeout=40,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.req("SE-02")
def test_a_first_send_that_waits_for_a_locked_file_leaves_the_event_loop_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    Address(url).open(asynchronous=False).close()
    app = Onceward("shop")

    @app.consumer(url)
    def charge(order: int) -> None: ...

    async def send_while_it_is_locked(other: sqlite3.Connection) -> None:
        other.execute("BEGIN IMMEDIATE")
        sends = [asyncio.ensure_future(charge.send_async(number)) for number in range(3)]
        await asyncio.sleep(0.2)
        sends.pop().cancel()
        other.execute("ROLLBACK")  # an event loop that is blocked does not get here
        await asyncio.gather(*sends)

    with closing(sqlite3.connect(tmp_path / "orders.db", isolation_level=None)) as other:
        asyncio.run(send_while_it_is_locked(other))
    with Address(url).open(asynchronous=False) as connector:
        assert sorted(each.payload for each in connector.fetch_transactions(10)) == [0, 1]
