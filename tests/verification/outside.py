"""Handlers of `inbox.process` that reach the outside world by detours, and others that only look as if they did."""

from __future__ import annotations

import _thread
import asyncio
import atexit
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from zoneinfo import ZoneInfo

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import AsyncConsumerTask, ConsumerTask, Onceward, Transaction
from onceward.boundary.client.client import BoundaryClient
from onceward.connectors import AsyncMemoryConnector, AsyncSqliteConnector, MemoryConnector, SqliteConnector
from onceward.db import AsyncDbSession, DbSession
from onceward.inbox import Event, Inbox
from tests.verification.consumers import INSERT, contract, values

FOLDER = Path(tempfile.mkdtemp(prefix="onceward-outside-"))
QUEUE = FOLDER / "queue.db"
"""A live source. No verification may add to it."""
SERVER = socket.create_server(("127.0.0.1", 0))
"""The outside world, which never answers."""
ADDRESS = SERVER.getsockname()
URL = "http://{}:{}/".format(*ADDRESS)
OPEN = socket.create_connection(ADDRESS)
"""A connection from before the fork."""
JOURNAL = (FOLDER / "journal").open("a")
DIARY = (FOLDER / "diary.log").open("a")
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()
OTHER = create_engine(f"sqlite:///{FOLDER / 'other.db'}")
ASYNC_OTHER = create_async_engine(f"sqlite+aiosqlite:///{FOLDER / 'other.db'}")
with OTHER.begin() as connection:
    connection.exec_driver_sql("CREATE TABLE notes (id TEXT)")
NOTE = "INSERT INTO notes VALUES ('x')"

app = Onceward(database=f"sqlite:///{FOLDER / 'app.db'}")
sqlite_queue = SqliteConnector(QUEUE)
memory_queue = MemoryConnector()


@app.producer(f"sqlite:///{QUEUE}")
def announce(id: str) -> Iterator[dict[str, str]]:
    yield {"id": id}


@app.consumer("redis://127.0.0.1:1/shipments")
def ship(order: dict[str, str]) -> None: ...


@app.producer("redis://127.0.0.1:1/orders")
async def announce_later(id: str) -> AsyncIterator[dict[str, str]]:
    yield {"id": id}


def connect() -> None:
    socket.create_connection(ADDRESS).close()


def message(event: Event) -> Transaction:
    return Transaction(payload={"id": event.tracking_id})


def save(event: Event, session: Any) -> None:
    session.execute(INSERT, {"id": event.tracking_id, "total": event.payload["total"]})


async def save_async(event: Event, session: Any) -> None:
    await session.execute(INSERT, {"id": event.tracking_id, "total": event.payload["total"]})


def leaves_signs(event: Event, session: Any) -> None:
    save(event, session)
    place = FOLDER / secrets.token_hex(8)
    os.mkfifo(f"{place}-fifo")
    os.mknod(f"{place}-node")
    os.chmod(f"{place}-fifo", 0o600)
    os.utime(f"{place}-fifo")
    os.kill(os.getpid(), signal.SIGURG)  # which nobody minds
    os.kill(os.getppid(), 0)


# ── through onceward's own classes ──────────────────────────────────────────────────────────────────────


def produces(event: Event, session: Any) -> None:
    save(event, session)
    app.produce(announce, event.tracking_id)  # outside


async def produces_async(event: Event, session: Any) -> None:
    await save_async(event, session)
    await app.produce_async(announce_later, event.tracking_id)  # outside


def sends(event: Event, session: Any) -> None:
    save(event, session)
    ship.send({"id": event.tracking_id})  # outside


async def sends_many_async(event: Event, session: Any) -> None:
    await save_async(event, session)
    await ship.send_many_async([{"id": event.tracking_id}])  # outside


def dispatches_to_sqlite(event: Event, session: Any) -> None:
    save(event, session)
    sqlite_queue.dispatch_transactions([message(event)])  # outside


def dispatches_and_hides_it(event: Event, session: Any) -> None:
    save(event, session)
    try:
        sqlite_queue.dispatch_transactions([message(event)])  # outside
    except Exception:
        logging.exception("not sent")


def dispatches_in_a_thread(event: Event, session: Any) -> None:
    save(event, session)
    POOL.submit(sqlite_queue.dispatch_transactions, [message(event)]).exception()  # outside


def dispatches_to_memory(event: Event, session: Any) -> None:
    save(event, session)
    memory_queue.dispatch_transactions([message(event)])  # outside


async def dispatches_async(event: Event, session: Any) -> None:
    await save_async(event, session)
    async with AsyncMemoryConnector() as queue:
        await queue.dispatch_transactions_async([message(event)])  # outside


async def opens_a_connector(event: Event, session: Any) -> None:
    await save_async(event, session)
    AsyncSqliteConnector(QUEUE)  # outside


def takes_messages(event: Event, session: Any) -> None:
    save(event, session)
    sqlite_queue.fetch_transactions(1)  # outside


def appends_a_fact(event: Event, session: Any) -> None:
    save(event, session)
    BoundaryClient("http://127.0.0.1:1").append(None, None)  # type: ignore[arg-type]  # outside


def opens_another_session(event: Event, session: Any) -> None:
    save(event, session)
    with DbSession(OTHER) as other:
        other.execute(NOTE)  # outside


async def opens_another_session_async(event: Event, session: Any) -> None:
    await save_async(event, session)
    async with AsyncDbSession(ASYNC_OTHER) as other:
        await other.execute(NOTE)  # outside


def has_another_inbox(event: Event, session: Any) -> None:
    save(event, session)
    Inbox(OTHER).migrate()  # outside


THROUGH_US = [
    produces,
    produces_async,
    sends,
    sends_many_async,
    dispatches_to_sqlite,
    dispatches_and_hides_it,
    dispatches_in_a_thread,
    dispatches_to_memory,
    dispatches_async,
    opens_a_connector,
    takes_messages,
    appends_a_fact,
    opens_another_session,
    opens_another_session_async,
    has_another_inbox,
]

# ── in other threads and tasks ──────────────────────────────────────────────────────────────────────────


async def calls_a_library_in_a_thread(event: Event, session: Any) -> None:
    await save_async(event, session)
    await asyncio.to_thread(socket.create_connection, ADDRESS)  # outside


async def calls_in_an_executor(event: Event, session: Any) -> None:
    await save_async(event, session)
    await asyncio.get_running_loop().run_in_executor(None, socket.create_connection, ADDRESS)  # outside


async def waits_for_a_connection(event: Event, session: Any) -> None:
    await save_async(event, session)
    await asyncio.wait_for(asyncio.open_connection(*ADDRESS), 5)  # outside


async def calls_in_a_task_group(event: Event, session: Any) -> None:
    await save_async(event, session)
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.open_connection(*ADDRESS))  # outside


def submits_and_waits(event: Event, session: Any) -> None:
    save(event, session)
    POOL.submit(socket.create_connection, ADDRESS).result()  # outside


def starts_a_thread_and_waits(event: Event, session: Any) -> None:
    save(event, session)
    thread = threading.Thread(target=socket.create_connection, args=[ADDRESS])
    thread.start()  # outside
    thread.join()


def runs_a_loop(event: Event, session: Any) -> None:
    async def call() -> None:
        await asyncio.gather(asyncio.open_connection(*ADDRESS))  # outside

    save(event, session)
    asyncio.run(call())


def starts_a_process(event: Event, session: Any) -> None:
    save(event, session)
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()  # outside
    process.join()


def sends_over_an_open_connection(event: Event, session: Any) -> None:
    save(event, session)
    OPEN.sendall(b"an order came")  # outside


def sends_over_an_open_file(event: Event, session: Any) -> None:
    save(event, session)
    with OPEN.makefile("w") as file:
        file.write("an order came")
        file.flush()  # outside


def starts_a_bare_thread_and_waits(event: Event, session: Any) -> None:
    save(event, session)
    done = _thread.allocate_lock()
    done.acquire()

    def work() -> None:
        (FOLDER / "bare").open("a").close()  # outside
        done.release()

    _thread.start_new_thread(work, ())
    done.acquire()


def writes_to_an_open_file(event: Event, session: Any) -> None:  # outside
    save(event, session)
    JOURNAL.write("an order came")


ELSEWHERE = [
    writes_to_an_open_file,
    calls_a_library_in_a_thread,
    calls_in_an_executor,
    waits_for_a_connection,
    calls_in_a_task_group,
    submits_and_waits,
    starts_a_thread_and_waits,
    starts_a_bare_thread_and_waits,
    runs_a_loop,
    starts_a_process,
    sends_over_an_open_connection,
    sends_over_an_open_file,
]

# ── left running ────────────────────────────────────────────────────────────────────────────────────────


def starts_a_thread(event: Event, session: Any) -> None:
    save(event, session)
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # outside


def sets_a_timer(event: Event, session: Any) -> None:
    save(event, session)
    timer = threading.Timer(60, connect)
    timer.daemon = True
    timer.start()  # outside


def sets_an_alarm(event: Event, session: Any) -> None:
    save(event, session)
    signal.alarm(600)  # outside


def submits(event: Event, session: Any) -> None:
    save(event, session)
    ThreadPoolExecutor(1).submit(threading.Event().wait, 0.3)  # outside


def registers_work(event: Event, session: Any) -> None:
    save(event, session)
    atexit.register(connect)  # outside


async def creates_a_task(event: Event, session: Any) -> None:
    await save_async(event, session)
    _kept.append(asyncio.create_task(asyncio.sleep(60)))  # outside


async def calls_later(event: Event, session: Any) -> None:
    await save_async(event, session)
    asyncio.get_running_loop().call_later(60, connect)  # outside


_kept: list[Any] = []
LEFT_RUNNING = [
    starts_a_thread,
    sets_a_timer,
    sets_an_alarm,
    submits,
    registers_work,
    creates_a_task,
    calls_later,
]


async def creates_a_task_that_calls(event: Event, session: Any) -> None:
    await save_async(event, session)
    _kept.append(asyncio.create_task(call_soon_after()))


async def call_soon_after() -> None:
    await asyncio.sleep(0.01)
    connect()


# ── in other steps ──────────────────────────────────────────────────────────────────────────────────────


class CallsOnSuccess(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> None:
        urlopen(f"http://127.0.0.1:1/{transaction.id}").close()  # outside


class WritesOnFailure(ConsumerTask):
    contract = contract()

    def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        session.execute(INSERT, values(transaction))

    def handle_transaction_exception(self, transaction: Transaction, exc: Any) -> None:
        (FOLDER / "failures").write_text(transaction.id)  # outside


class AsyncProducesOnSuccess(AsyncConsumerTask):
    contract = contract()

    async def process_transaction(self, transaction: Transaction, session: Any) -> None:  # type: ignore[override]
        await session.execute(INSERT, values(transaction))

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> None:
        await app.produce_async(announce_later, transaction.id)  # outside


# ── correct ─────────────────────────────────────────────────────────────────────────────────────────────


def produces_as_an_effect(event: Event, session: Any) -> None:
    session.effect("announce", lambda key: app.produce(announce, key).succeeded)
    session.effect("queue", lambda key: sqlite_queue.dispatch_transactions([message(event)]))
    save(event, session)


async def calls_in_threads_as_an_effect(event: Event, session: Any) -> None:
    async def call(key: str) -> None:
        await asyncio.to_thread(connect)
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(connect))
        POOL.submit(connect).result()
        JOURNAL.write(key)

    await session.effect("call", call)
    await save_async(event, session)


def computes_in_threads(event: Event, session: Any) -> None:
    timer = threading.Timer(60, connect)
    timer.start()
    timer.cancel()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    total = POOL.submit(int, event.payload["total"]).result()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(int, [1, 2])) == [1, 2]
    session.execute(INSERT, {"id": event.tracking_id, "total": total})


async def computes_in_tasks(event: Event, session: Any) -> None:
    """If one of these fails, `gather` does not wait for the other."""
    await asyncio.gather(save_async(event, session), save_async(event, session))
    abandoned = asyncio.create_task(asyncio.sleep(60))
    abandoned.cancel()
    async with asyncio.timeout(60):
        await asyncio.to_thread(int)


def only_looks_suspicious(event: Event, session: Any) -> None:
    assert ZoneInfo("Europe/Berlin").key
    assert secrets.token_bytes(1)
    assert Path(__file__).read_text()
    left, right = socket.socketpair()
    left.sendall(b"x")
    left.close()
    right.close()
    logging.getLogger("shop").warning("an order came")
    print("an order came", file=DIARY, flush=True)
    Path(os.devnull).write_text("an order came")
    save(event, session)
    signal.setitimer(signal.ITIMER_REAL, 600)  # a limit, which it takes back
    signal.setitimer(signal.ITIMER_REAL, 0)


CORRECT = [
    produces_as_an_effect,
    calls_in_threads_as_an_effect,
    computes_in_threads,
    computes_in_tasks,
    only_looks_suspicious,
]
