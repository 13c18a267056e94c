"""`onceward demo`, as a user runs it: real processes, a real kill, a real terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onceward.cli.demo import crew
from onceward.cli.main import app

DEMO = [sys.executable, "-c", "from onceward.cli.main import main; main()", "demo"]
BAD_WORKERS = Path(__file__).with_name("bad_workers.py")
PID = re.compile(r"started.* \(pid (\d+)\)")
FEW = ("--orders", "100")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "data"


@pytest.fixture(scope="module")
def ended(data: Path) -> subprocess.CompletedProcess[str]:
    """A demo that went well, for machines."""
    return subprocess.run(
        [*DEMO, *FEW, "--json", "--data", str(data)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def result(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ended.returncode == 0, ended.stderr
    figures: dict[str, Any] = json.loads(ended.stdout)
    return figures


def test_every_order_is_applied_or_a_dead_letter(result: dict[str, Any]) -> None:
    balance = result["balance"]
    assert result["balanced"] is True
    assert result["problems"] == []
    assert balance["produced"] == 100 == balance["applied"] + balance["dead_lettered"]
    assert balance["lost"] == 0
    assert balance["expected_cents"] == balance["ledger_cents"] > 0


def test_refused_orders_die_at_once_and_poison_after_all_its_deliveries(result: dict[str, Any]) -> None:
    fates = result["fates"]
    assert result["dead_letters"] == {"BUSINESS": fates["refused"], "SYSTEM": fates["poison"]}


def test_every_copy_is_recognised(result: dict[str, Any]) -> None:
    assert result["messages"] == 100 + result["fates"]["twice"]
    assert result["duplicates"] == result["fates"]["twice"] > 0


def test_a_worker_is_killed_in_the_middle_of_a_batch_and_all_it_held_is_delivered_again(
    result: dict[str, Any], data: Path
) -> None:
    crash = result["crash"]
    assert 0 < crash["applied_but_held"] < crash["held"]
    assert result["redelivered"] >= crash["held"]
    assert result["recognised"] >= crash["applied_but_held"], "effects that crossed the kill"
    assert not is_alive(crash["pid"])
    assert (data / f"{crash['worker']}.2.log").exists(), "it was started again"


def test_a_folder_that_was_named_is_kept_with_queue_and_ledger(result: dict[str, Any], data: Path) -> None:
    assert result["data"] == str(data)
    assert {"queue.db", "ledger.db", "journal.db"} <= {file.name for file in data.iterdir()}


def test_without_a_terminal_progress_is_lines_on_stderr(ended: subprocess.CompletedProcess[str]) -> None:
    assert "producing 105 messages" in ended.stderr
    assert "killed with -9" in ended.stderr
    assert "started again" in ended.stderr
    assert "100 of 100 orders settled" in ended.stderr
    assert "\x1b" not in ended.stderr


def test_on_a_terminal_progress_is_bars_and_the_verdict_stands_on_stdout(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    demo = subprocess.Popen(
        [*DEMO, *FEW, "--seed", "2"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    watched: list[bytes] = []
    watcher = threading.Thread(target=read_all, args=(ours, watched))
    watcher.start()
    told, _ = demo.communicate(timeout=60)
    watcher.join()
    os.close(ours)
    screen = b"".join(watched).decode()
    assert demo.returncode == 0, screen
    assert "━" in screen
    assert "100/100" in screen
    assert "killed with -9" in screen
    assert re.search(r"It balances: 100 produced = \d+ applied \+ \d+ dead-lettered", told)
    assert list(tmp_path.iterdir()) == [], "the temporary folder is gone"


def test_a_ledger_that_forgets_what_it_has_applied_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "PROGRAM", [sys.executable, str(BAD_WORKERS), "forgetful"])
    ran = CliRunner().invoke(app, ["demo", *FEW, "--json"])
    assert ran.exit_code == 1
    figures = json.loads(ran.stdout)
    assert figures["balanced"] is False
    assert figures["balance"]["lost"] == 0
    assert figures["balance"]["ledger_cents"] > figures["balance"]["expected_cents"]
    assert "where its applied orders are worth" in figures["problems"][0]


def test_a_worker_that_dies_by_itself_ends_the_demo_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "PROGRAM", [sys.executable, str(BAD_WORKERS), "broken"])
    ran = CliRunner().invoke(app, ["demo", *FEW])
    assert ran.exit_code == 1
    assert "ended by itself with exit code 1" in ran.stderr
    assert "RuntimeError: no coffee" in ran.stderr


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a demo that will not end soon; it has ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        demo = subprocess.Popen(
            [*DEMO, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        started.append(demo)
        return demo

    yield start
    for demo in started:
        demo.kill()
        demo.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_workers_and_removes_the_folder(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    demo = start()
    pids = workers_of(demo)
    demo.send_signal(number)
    told, errors = demo.communicate(timeout=20)
    assert demo.returncode == 128 + number
    assert told == ""
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not any(map(is_alive, pids))
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_producing_ends_as_cleanly(start: Start, tmp_path: Path) -> None:
    demo = start("--orders", "100000", "--json")
    assert demo.stderr is not None
    assert "producing" in demo.stderr.readline()
    demo.send_signal(signal.SIGINT)
    told, errors = demo.communicate(timeout=20)
    assert demo.returncode == 130
    assert json.loads(told)["balanced"] is False
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_workers_do_not_outlive_a_demo_that_is_killed(start: Start) -> None:
    demo = start()
    pids = workers_of(demo)
    demo.kill()
    demo.communicate(timeout=20)
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workers_of(demo: subprocess.Popen[str]) -> list[int]:
    """The processes of its two workers, once they are started."""
    pids: list[int] = []
    assert demo.stderr is not None
    while len(pids) < 2:
        line = demo.stderr.readline()
        assert line, "the demo ended"
        pids += map(int, PID.findall(line))
    return pids


def is_alive(pid: int) -> bool:
    """Whether the process runs. One that has ended and that nobody has asked about does not."""
    status = Path(f"/proc/{pid}/stat")
    if status.parent.parent.exists() and not status.exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def read_all(terminal: int, into: list[bytes]) -> None:
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # how Linux says that the other end is closed
            return
        if not data:
            return
        into.append(data)
