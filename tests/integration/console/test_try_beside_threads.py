"""A payload is tried in a fork of the console, whose other threads use the same SQLite database."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.console.test_access import Shop

pytestmark = pytest.mark.req("UI-08")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    made.bury("a")
    yield made
    made.engine.dispose()


def test_a_thread_that_is_in_a_transaction_does_not_lock_it_out(shop: Shop, tmp_path: Path) -> None:
    locked = threading.Event()

    def write() -> None:
        with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            locked.set()
            time.sleep(0.5)
            connection.execute("ROLLBACK")

    client = shop.client()
    client.get("/login")  # sends no more before the form
    thread = threading.Thread(target=write)
    thread.start()
    assert locked.wait(30)
    answer = client.post("/letters/1/edit", payload='{"id": "a", "n": 1}', cause="a wrong number", do="save")
    thread.join()
    assert answer.status_code == 303, answer.text
