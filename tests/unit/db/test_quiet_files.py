"""A moment without connections to a SQLite file, for a fork."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import create_engine

from onceward.db.backends.quiet_files import await_quiet_file, is_open


def test_it_waits_until_another_thread_has_closed_its_connection(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///{path}")
    used, closed = threading.Event(), threading.Event()

    def use() -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE orders (id)")
            used.set()
            time.sleep(0.2)
            closed.set()

    thread = threading.Thread(target=use)
    thread.start()
    assert used.wait(30)
    await_quiet_file(engine, 30)
    assert closed.is_set()
    assert not is_open(str(path))
    thread.join()


def test_it_closes_idle_connections_of_its_engine(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id)")
    assert is_open(str(path))
    await_quiet_file(engine, 30)
    assert not is_open(str(path))


def test_it_does_not_wait_longer_than_it_may(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id)")
        await_quiet_file(create_engine(f"sqlite:///{path}"), 0.05)
        assert is_open(str(path))


def test_a_database_in_memory_needs_no_wait() -> None:
    began = time.monotonic()
    await_quiet_file(create_engine("sqlite://"), 30)
    await_quiet_file(create_engine("sqlite:///:memory:"), 30)
    assert time.monotonic() - began < 10
