"""`onceward demo`, as a user runs it: real processes, a real kill, a real cut, a real terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from onceward.boundary.server.launch import VARIABLE
from onceward.cli.main import app
from onceward.demo import crew, story
from tests.integration.demo.bad_workers import DOUBLED, LOST
from tests.support.processes import Start, processes
from tests.support.wait import until

DEMO = [sys.executable, "-c", "from onceward.cli.main import main; main()", "demo"]
BAD_WORKERS = Path(__file__).with_name("bad_workers.py")
FEW = ("--orders", "100")
DEADLINE = 90.0


class Ended(NamedTuple):
    code: int
    figures: dict[str, Any]
    screen: str
    seconds: float
    data: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A successful demo: figures on stdout, and a terminal on stderr."""
    data = tmp_path_factory.mktemp("demo") / "data"
    ours, theirs = pty.openpty()
    began = time.monotonic()
    demo = subprocess.Popen(
        [*DEMO, *FEW, "--json", "--data", str(data)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    watched: list[bytes] = []
    watcher = threading.Thread(target=read_all, args=(ours, watched))
    watcher.start()
    reported, _ = demo.communicate(timeout=DEADLINE)
    seconds = time.monotonic() - began
    watcher.join()
    os.close(ours)
    screen = b"".join(watched).decode()
    assert reported, screen
    return Ended(demo.returncode, json.loads(reported), screen, seconds, data)


@pytest.fixture
def figures(ended: Ended) -> dict[str, Any]:
    assert (ended.code, ended.figures["problems"]) == (0, []), ended.screen
    return ended.figures


def test_nothing_is_lost_between_two_stages(figures: dict[str, Any]) -> None:
    balance = figures["balance"]
    assert figures["balanced"] is True
    assert balance["messages"] == balance["produced"] == balance["appended"] + balance["duplicates"]
    assert balance["appended"] == balance["forwarded"] == 100
    assert balance["same_log"] is True
    assert balance["forwarded"] == balance["applied"] + balance["dead_letters"]
    assert (balance["lost"], balance["twice"]) == (0, 0)
    assert balance["expected_pieces"] == balance["pieces"] > 0


def test_every_copy_is_known_to_the_shops_boundary(figures: dict[str, Any]) -> None:
    assert figures["balance"]["duplicates"] == figures["fates"]["twice"] > 0


def test_the_link_is_cut_and_both_zones_go_on(figures: dict[str, Any]) -> None:
    cut = figures["cut"]
    assert cut["seconds"] >= story.CUT_SECONDS
    assert cut["appended"] > 0
    assert cut["applied"] > 0
    assert cut["waiting"] > 0


def test_a_worker_is_killed_in_the_middle_of_a_batch_and_started_again(
    figures: dict[str, Any], ended: Ended
) -> None:
    crash = figures["crash"]
    assert 0 < crash["applied_but_held"] < crash["held"]
    assert figures["came_again"] > 0
    assert (ended.data / f"{crash['worker']}.2.log").exists()


def test_refused_and_poison_stay_dead_letters_and_the_mended_one_is_redriven_and_applied(
    figures: dict[str, Any],
) -> None:
    fates, redriven = figures["fates"], figures["redriven"]
    assert figures["dead_letters"] == {"business": fates["refused"], "infrastructure": fates["poison"]}
    assert redriven["applied"] is True
    assert "not in our list" in redriven["died_of"]


def test_it_takes_less_than_90_seconds(ended: Ended) -> None:
    assert ended.seconds < 90


def test_a_folder_that_was_named_is_kept_with_both_logs_and_the_ledger(ended: Ended) -> None:
    assert ended.figures["data"] == str(ended.data)
    assert {"shop", "warehouse", "ledger.db"} <= {file.name for file in ended.data.iterdir()}


def test_on_a_terminal_each_stage_has_a_bar_and_each_turning_point_a_line(ended: Ended) -> None:
    for reported in ("━", "105/105", "100/100", "link cut", "link healed", "killed with -9", "restarted"):
        assert reported in ended.screen
    assert "article-new added to the list" in ended.screen


def test_none_of_its_processes_is_left(ended: Ended) -> None:
    assert processes_about(ended.data) == []


def test_an_effect_that_is_lost_and_one_that_is_doubled_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "PROGRAM", [sys.executable, str(BAD_WORKERS), "careless"])
    monkeypatch.setattr(story, "CUT_SECONDS", 0.3)
    ran = CliRunner().invoke(app, ["demo", *FEW, "--json"])
    assert ran.exit_code == 1
    found = json.loads(ran.stdout)
    assert found["balanced"] is False
    assert (found["balance"]["lost"], found["balance"]["twice"]) == (1, 1)
    assert f"1 orders are neither shipped nor a dead letter: {LOST}" in found["problems"]
    assert f"1 orders are shipped more than once: {DOUBLED}" in found["problems"]
    assert "killed with -9" in ran.stderr
    assert "\x1b" not in ran.stderr, "there is no terminal"


def test_a_worker_that_dies_by_itself_ends_the_demo_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "PROGRAM", [sys.executable, str(BAD_WORKERS), "broken"])
    ran = CliRunner().invoke(app, ["demo", *FEW])
    assert ran.exit_code == 1
    assert "ended by itself with exit code 1" in ran.stderr
    assert "RuntimeError: no coffee" in ran.stderr


def test_without_the_boundarys_packages_it_says_what_to_install() -> None:
    without = "import sys; sys.modules['connectrpc'] = None; from onceward.cli.main import main; main()"
    ran = subprocess.run([sys.executable, "-c", without, "demo"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "a boundary needs connectrpc: pip install 'onceward[boundary]'\n"


# ── interrupted ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a demo that will not end soon; it has ended after the test."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with processes() as begin:
        yield lambda *arguments: begin([*DEMO, *arguments], stderr=subprocess.PIPE, env=environment)


@pytest.mark.parametrize(
    ("number", "when"),
    [
        pytest.param(signal.SIGINT, "link cut", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "worker-2 started", marks=pytest.mark.long),
        (signal.SIGINT, "orders in"),
    ],
)
def test_ctrl_c_ends_all_processes_and_removes_the_folder(
    start: Start, tmp_path: Path, number: signal.Signals, when: str
) -> None:
    demo = start(*FEW, "--json")
    wait_for(demo, when)
    demo.send_signal(number)
    reported, errors = demo.communicate(timeout=DEADLINE)
    assert demo.returncode == 128 + number
    assert json.loads(reported)["balanced"] is False
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert processes_about(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_no_process_outlives_a_demo_that_is_killed(start: Start, tmp_path: Path) -> None:
    demo = start(*FEW)
    wait_for(demo, "worker-2 started")
    assert len(processes_about(tmp_path)) == 4, "two zones, two workers"
    demo.kill()
    demo.communicate(timeout=DEADLINE)
    until(lambda: not processes_about(tmp_path))


def wait_for(demo: subprocess.Popen[str], news: str) -> None:
    assert demo.stderr is not None
    for line in demo.stderr:
        if news in line:
            return
    raise AssertionError("the demo ended")


def processes_about(folder: Path) -> list[int]:
    """The processes with it in their command line, as workers have, or in their orders, as zones have on Envoy."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and any(os.fsencode(folder) in text for text in texts_of(process)):
                found.append(int(process.name))
        except OSError:  # it has just ended
            continue
    return found


def texts_of(process: Path) -> list[bytes]:
    environment = (process / "environ").read_bytes().split(b"\0")
    orders = [each for each in environment if each.startswith(f"{VARIABLE}=".encode())]
    return [(process / "cmdline").read_bytes(), *orders]


def read_all(terminal: int, into: list[bytes]) -> None:
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # how Linux reports that the other end is closed
            return
        if not data:
            return
        into.append(data)
