"""Kill the sender after its commit and the relay at each boundary: nothing is lost, copies have the same id."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from onceward.connectors import SqliteConnector
from onceward.inbox import Inbox
from onceward.transaction import Transaction
from tests.support import ROOT
from tests.support.schema import url_of

KILLED = -9


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with url_of(request.param, tmp_path, request) as url:
        yield url


def child(url: str, sink: str, point: str) -> int:
    command = [sys.executable, "-m", "tests.crash.outbox.child", url, sink, point]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=120).returncode


def arrived(path: Path) -> list[Transaction]:
    with SqliteConnector(path) as queue:
        found: list[Transaction] = []
        while batch := queue.fetch_transactions(100):
            found += batch
        return found


@pytest.mark.req("OB-13")
@pytest.mark.parametrize("point", ["claimed", "dispatched"])
def test_a_killed_relay_loses_nothing_and_copies_only_with_the_same_id(
    url: str, tmp_path: Path, point: str
) -> None:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    Inbox(engine).migrate()
    engine.dispose()
    sink = f"sqlite:///{tmp_path}/ship.db"
    assert child(url, sink, "committed") == KILLED
    assert child(url, sink, point) == KILLED
    assert child(url, sink, point) == KILLED
    assert child(url, sink, "never") == 0
    found = arrived(tmp_path / "ship.db")
    first = list(dict.fromkeys((each.id, each.payload) for each in found))
    assert sorted(payload for _, payload in first) == list(range(10))
    assert set(Counter(each.id for each in found).values()) == {3 if point == "dispatched" else 1}
    for key in (0, 1):
        of_key = [payload for _, payload in first if payload % 2 == key]
        assert of_key == sorted(of_key)
