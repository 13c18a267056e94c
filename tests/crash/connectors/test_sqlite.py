"""Processes die at the worst moment; the SQLite queue loses nothing, and duplicates no more than it must."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onceward.connectors import BurialReason, SqliteConnector
from onceward.transaction import Transaction
from tests.support.processes import Start, processes
from tests.support.wait import until

SCRIPT = Path(__file__).with_name("sqlite_processes.py")
LEASE = 60.0
DISPATCH = 500


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Starts one of `sqlite_processes`."""
    with processes() as begin:
        yield lambda what, ahead=0.0: begin([sys.executable, str(SCRIPT), what, str(path), str(ahead)])


def connect(path: Path, ahead: float = 0.0, **settings: Any) -> SqliteConnector:
    return SqliteConnector(path, max_deliveries=3, clock=lambda: time.time() + ahead, **settings)


def said(process: subprocess.Popen[str]) -> list[str]:
    """Its whole output, after it has ended."""
    assert process.stdout is not None
    text = process.stdout.read()  # not `communicate`, which loses what `readline` has read ahead
    process.wait(60)
    return text.split()


def deliveries(path: Path) -> list[int]:
    connection = sqlite3.connect(path)
    try:
        return [count for (count,) in connection.execute("SELECT deliveries FROM messages ORDER BY seq")]
    finally:
        connection.close()


def test_what_a_killed_process_had_fetched_is_delivered_again_in_real_time_when_its_lease_runs_out(
    path: Path,
) -> None:
    lease = 1.0
    with connect(path, lease=lease) as queue:
        queue.dispatch_transactions([Transaction(payload="a")])
        code = (
            "import os, signal, sys\n"
            "from onceward.connectors import SqliteConnector\n"
            f"queue = SqliteConnector({str(path)!r}, lease={lease})\n"
            "assert len(queue.fetch_transactions(10)) == 1\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        before = time.time()
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
        assert deliveries(path) == [1], "counted before it was delivered"
        again = until(lambda: queue.fetch_transactions(10))
        assert time.time() - before >= lease
        assert [transaction.payload for transaction in again] == ["a"]
        assert deliveries(path) == [2]


def test_a_process_killed_from_outside_in_the_midst_of_its_work_gives_everything_up(
    path: Path, start: Start
) -> None:
    with connect(path) as queue, connect(path, ahead=LEASE + 1) as later:
        queue.dispatch_transactions([Transaction(payload=number) for number in range(3)])
        process = start("fetch_and_hang")
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        process.kill()
        process.wait()
        assert queue.fetch_transactions(10) == []
        assert [transaction.payload for transaction in later.fetch_transactions(10)] == [0, 1, 2]
        assert deliveries(path) == [2, 2, 2]


def test_a_message_that_kills_its_processes_ends_as_a_dead_letter_and_its_batch_mates_survive(
    path: Path, start: Start
) -> None:
    with connect(path) as queue:
        queue.dispatch_transactions([Transaction(payload=word) for word in ["a", "b", "poison", "c", "d"]])
        codes, survivors = [], []
        for generation in range(4):
            process = start("consume", ahead=generation * (LEASE + 1))
            survivors += said(process)
            codes.append(process.returncode)
        assert codes == [-9, -9, -9, 0]
        assert sorted(survivors) == ["a", "b", "c", "d"]
        [letter] = queue.dead_letters()
        assert letter.transaction is not None
        assert letter.transaction.payload == "poison"
        assert (letter.reason, letter.deliveries) == (BurialReason.MAX_DELIVERIES, 3)
        assert queue.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 1}


def test_several_processes_share_one_file_and_no_delivery(path: Path, start: Start) -> None:
    with connect(path) as queue:
        queue.dispatch_transactions([Transaction(payload=number) for number in range(2000)])
        processes = [start("consume") for _ in range(3)]
        taken = [int(word) for process in processes for word in said(process)]
        assert [process.returncode for process in processes] == [0, 0, 0]
        assert sorted(taken) == list(range(2000))
        assert queue.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


def test_several_processes_may_create_the_same_file_at_once(path: Path, start: Start) -> None:
    processes = [start("consume") for _ in range(4)]
    assert [said(process) for process in processes] == [[], [], [], []]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]


def test_a_process_killed_before_the_commit_of_a_dispatch_has_sent_nothing(path: Path, start: Start) -> None:
    process = start("die_before_the_commit_of_a_dispatch")
    assert process.wait(60) == -9
    with connect(path) as queue:
        assert queue.fetch_transactions(10) == []


def test_a_process_killed_while_it_dispatches_has_sent_each_batch_whole_or_not_at_all(
    path: Path, start: Start
) -> None:
    process = start("dispatch_for_ever")
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    process.kill()
    announced = 20 + len(said(process))
    with connect(path) as queue:
        left = [transaction.payload for transaction in queue.fetch_transactions(10**9)]
    assert len(left) in (announced * DISPATCH, (announced + 1) * DISPATCH)
    assert left == [number for number in range(len(left) // DISPATCH) for _ in range(DISPATCH)]


def test_a_process_killed_in_the_midst_of_a_burial_leaves_the_message_in_the_queue_only(
    path: Path, start: Start
) -> None:
    with connect(path, ahead=LEASE + 1) as later:
        later.dispatch_transactions([Transaction(payload="a")])
        assert start("die_between_copy_and_removal_of_a_burial").wait(60) == -9
        assert later.dead_letters() == []
        assert [transaction.payload for transaction in later.fetch_transactions(10)] == ["a"]


def test_a_connector_goes_on_in_parent_and_child_after_a_fork(path: Path, start: Start) -> None:
    process = start("fork_and_share")
    assert sorted(map(int, said(process))) == list(range(200))
    assert process.returncode == 0
    with connect(path) as queue:
        assert queue.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


def test_a_child_that_is_forked_while_a_thread_opens_the_file_can_use_it(path: Path, start: Start) -> None:
    process = start("fork_while_a_thread_opens")
    assert sorted(said(process)) == ["child", "parent"]
    assert process.returncode == 0
