"""The examples of docs/boundary-consuming.md run as they stand, from the first to the last."""

from __future__ import annotations

import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.integration.boundary_consumer_world import Server

PAGE = Path(__file__).parents[2] / "docs" / "boundary-consuming.md"
URL = "http://127.0.0.1:7700"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "boundary")
    made.start()
    yield made
    made.stop()


def test_the_examples_run_in_order(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 5
    names: dict[str, Any] = {"__name__": "example"}
    before = signal.getsignal(signal.SIGTERM)
    try:
        for block in blocks:
            line = text[: text.index(block)].count("\n")
            exec(compile("\n" * line + block.replace(URL, server.url), str(PAGE), "exec"), names)
        names["test_set_level"]()
    finally:
        signal.signal(signal.SIGTERM, before)
        names["client"].close()
        names["engine"].dispose()
    with closing(sqlite3.connect("receiver.db")) as connection:
        booked = connection.execute("SELECT batch, litres FROM bookings").fetchall()
    assert booked == [("B1042", 480)] * 2, "by hand, and by the ready made loop"
    assert [call[1:] for call in server.calls if call[0] == "confirm"] == [
        ("by-hand", 1),
        ("plant-a-receiver", 1),
        ("archive", 2),
    ]
