"""The event loop of `async def` consumers in a run: that of uvloop, if it is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onceward.connectors import SqliteConnector
from onceward.transaction import Transaction
from tests.support import commands

APP = """
import asyncio
from pathlib import Path

from onceward import Onceward

app = Onceward("shop")


@app.consumer("sqlite:///orders.db", contract=None)
async def charge(order: dict) -> None:
    Path("loop.txt").write_text(type(asyncio.get_running_loop()).__module__)


"""
ABSENT = "raise ModuleNotFoundError('uvloop is not installed')"


@pytest.mark.req("IN-21")
@pytest.mark.parametrize(("installed", "expected"), [(True, "uvloop"), (False, "asyncio.unix_events")])
def test_it_is_that_of_uvloop_if_it_is_installed(installed: bool, expected: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    if not installed:
        (tmp_path / "uvloop.py").write_text(ABSENT)  # the directory is first on the path of a worker
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ONCEWARD_")}
    environ["PYTHONPATH"] = str(tmp_path)
    with SqliteConnector(tmp_path / "orders.db") as queue:
        queue.dispatch_transactions([Transaction(payload={"number": 1})])
    done = commands.onceward("run", "shop:app", "--drain", cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loop.txt").read_text() == expected
