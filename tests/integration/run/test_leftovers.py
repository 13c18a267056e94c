"""Processes that handlers started: they end before the messages of their worker are delivered again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onceward.run.leftovers import end_leftovers
from tests.support.run.world import Site
from tests.support.wait import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.req("RN-16")]

SHOP = """
import os
import subprocess
import time
from pathlib import Path
from onceward import Onceward

app = Onceward("shop")
LOOP = {"empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}}


def lives(pid):
    return Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def note(file, text):
    with Path(file).open("a") as lines:
        lines.write(f"{text}\\n")


@app.consumer("sqlite:///orders.db?lease=600&max_deliveries=9", policy={"loop": LOOP})
def charge(order: dict) -> None:
    earlier = Path("children.txt").read_text().split() if Path("children.txt").exists() else []
    note("begun.txt", "overlaps" if any(map(lives, earlier)) else "alone")
    if Path("fixed").exists():
        note("done.txt", order["id"])
        return
    child = subprocess.Popen(["sleep", "600"], start_new_session=order.get("apart", False))
    note("children.txt", child.pid)
    if order.get("waits", True):
        child.wait()
    note("done.txt", order["id"])
"""


def site_of(directory: Path) -> Site:
    made = Site(directory)
    (directory / "shop.py").write_text(SHOP)
    return made


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    if lives(pid):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_a_handler_started_ends_before_its_message_comes_again(tmp_path: Path, how: str) -> None:
    site = site_of(tmp_path)
    site.send({"id": "a"})
    with site.run("--health", "127.0.0.1:0") as run:
        [child] = until(lambda: site.lines("children.txt"))
        (tmp_path / "fixed").touch()
        [worker] = run.workers()
        if how == "killed":
            os.kill(worker, signal.SIGKILL)
        else:
            command = [
                sys.executable,
                "-m",
                "onceward",
                "end-worker",
                str(worker),
                "--grace",
                "0",
                "--reason",
                "r",
            ]
            subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
        until(lambda: site.done == ["a"])
        assert site.begun == ["alone", "alone"]
        assert not lives(int(child))
        assert run.has_said("had started")


def test_what_left_the_group_stays_and_so_does_everything_after_a_clean_end(tmp_path: Path) -> None:
    site = site_of(tmp_path)
    children = []
    try:
        site.send({"id": "a", "apart": True})
        with site.run("--health", "127.0.0.1:0") as run:
            until(lambda: site.lines("children.txt"))
            [worker] = run.workers()
            (tmp_path / "fixed").touch()
            os.kill(worker, signal.SIGKILL)
            until(lambda: site.done == ["a"])
            (tmp_path / "fixed").unlink()
            site.send({"id": "b", "waits": False})
            until(lambda: site.done == ["a", "b"])
        children = [int(each) for each in site.lines("children.txt")]
        assert [lives(each) for each in children] == [True, True]
    finally:
        for each in children:
            kill(each)


def leader(*code: str) -> subprocess.Popen[bytes]:
    """A process in a group of its own that starts another one and ends."""
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {';'.join(code)!r}])"
    made = subprocess.Popen([sys.executable, "-c", script], process_group=0)
    made.wait()
    return made


def members(group: int) -> list[int]:
    found = subprocess.run(["ps", "-e", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in found.stdout.splitlines()]
    return [int(pid) for pid, of, state in rows if int(of) == group and not state.startswith("Z")]


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ignores = "import signal, time, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    group = leader(ignores, f"pathlib.Path({str(ready)!r}).touch()", "time.sleep(600)").pid
    until(ready.exists)
    began = time.monotonic()
    assert asyncio.run(end_leftovers(group, 0.2))
    assert not members(group)
    assert time.monotonic() - began >= 0.2, "it was asked first"
    assert not asyncio.run(end_leftovers(group))


def test_a_number_that_another_process_has_by_now_is_left_alone() -> None:
    other = subprocess.Popen(["sleep", "600"], process_group=0)
    try:
        assert not asyncio.run(end_leftovers(other.pid, 0.0))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
