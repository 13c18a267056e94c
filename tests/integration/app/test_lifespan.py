"""The lifespan of an app in the workers of `onceward run`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.commands import onceward

SHOP = """
from onceward import Onceward

app = Onceward("shop", database="sqlite:///shop.db")


def report(what):
    with open("reported", "a") as file:
        file.write(what + " ")


@app.lifespan
def lifespan():
    report("begin")
    yield
    report("end")


@app.consumer("sqlite:///orders.db", contract=None)
def take(order: dict):
    report("message")
"""


@pytest.mark.req("IN-11")
def test_onceward_run_runs_it_around_the_messages_of_a_worker(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = onceward("run", "shop:app", "--drain", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reported").read_text().split() == ["begin", "end"]
