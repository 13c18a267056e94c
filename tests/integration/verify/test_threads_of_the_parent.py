"""A verification is forked from a process whose threads use SQLite: no child keeps a lock that it inherits.

SQLite has a few locks for the whole process. If a thread holds one of them during a fork, the child can never take it.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from onceward.verify import children, examine_app, examine_consumer
from onceward.verify.children import Broken, Watchdog, run_at_once, run_in_child
from tests.support.sqlite_locks import LOCKS, calls_in, held, held_for_a_moment, use_sqlite
from tests.verification import consumers, per_process
from tests.verification.consumers import EVENTS, setup


@pytest.fixture
def soon_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that hangs is noticed soon, for a test that fails."""
    monkeypatch.setattr(children, "PREPARING", 5.0)


@pytest.mark.usefixtures("soon_hung")
@pytest.mark.parametrize("lock", LOCKS)
def test_a_child_that_inherits_a_lock_of_sqlite_is_forked_again(lock: str, tmp_path: Path) -> None:
    def work(_: Watchdog) -> str:
        return use_sqlite(tmp_path)

    with held_for_a_moment(lock):
        assert run_in_child(work, 5.0).value() == "used"
    assert calls_in(tmp_path) == 1, "it ran in a child that was given up"
    with held_for_a_moment(lock):
        assert [each.value() for each in run_at_once([work] * 2, 5.0)] == ["used"] * 2


@pytest.mark.usefixtures("soon_hung")
def test_the_process_of_a_consumer_is_forked_again_too() -> None:
    with held_for_a_moment("files"):
        found = examine_app(per_process.app, only=["clean"], processes=2)
    assert all(each.report is not None and each.report["clean"].result == "passed" for each in found), found


def test_a_parent_that_never_lets_go_of_a_lock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "USABLE_WITHIN", (0.1, 0.1))
    with held("random numbers"), pytest.raises(Broken, match="a lock of SQLite is held here"):
        run_in_child(lambda _: None, 5.0)


@pytest.mark.usefixtures("soon_hung")
def test_a_consumer_passes_while_a_thread_of_its_module_uses_sqlite(tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.001):
            with closing(sqlite3.connect(tmp_path / "theirs.db")) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("CREATE TABLE IF NOT EXISTS any_table AS SELECT 1 AS number")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        report = examine_consumer(
            consumers.Right, events=EVENTS[:2], setup=setup, seed=7, only=("exceptions", "kills")
        )
    finally:
        stop.set()
        thread.join()
    assert report.passed, str(report)
