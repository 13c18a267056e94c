"""An operator ends the process of an attempt that is stuck and has no time limit: by the console, or the command."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from sqlalchemy import create_engine, text

from onceward.cli import run as commands_of_run
from onceward.deadletters import Category, DeadLetters
from onceward.errors import ConfigurationError
from onceward.run import supervisor as supervising
from onceward.run.end import ForeignWorker
from onceward.run.protocol import Assignment
from onceward.run.supervisor import EndAnswer, ProcessEnd, Supervisor
from tests.support import commands
from tests.support.run.world import Run, Site
from tests.support.wait import until, until_async

pytestmark = [pytest.mark.timeout(180), pytest.mark.req("UI-30")]

SHOP = """
import asyncio
import time
from pathlib import Path
from onceward import Contract, Onceward

app = Onceward("shop", database="sqlite:///shop.db")
LOOP = {"loop": {"concurrency": {"value": 2}, "empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}}}
contract = Contract(
    consumer_id="billing", event_types=["*"], owner_team="t", idempotency_mechanism="row", poison_after=9, lease=600
)


def note(order):
    with Path("begun.txt").open("a") as lines:
        lines.write(f"{order['id']}\\n")
    while order.get("hangs") and not Path("fixed").exists():
        time.sleep(0.05)


@app.consumer("sqlite:///orders.db?lease=600", contract=contract, policy=LOOP)
KIND charge(order: dict, session) -> None:
    note(order)
    AWAIT session.execute("INSERT INTO bills (id) VALUES (:id)", {"id": order["id"]})
"""
END = ProcessEnd("ann", "the bank hangs", 0.0)


class StuckSite(Site):
    def __init__(self, directory: Path, mode: str = "threads") -> None:
        super().__init__(directory, mode)
        is_async = mode == "asyncio"
        code = SHOP.replace("KIND", "async def" if is_async else "def").replace("AWAIT ", "await " * is_async)
        (directory / "shop.py").write_text(code)
        self.engine = create_engine(f"sqlite:///{directory}/shop.db")
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE bills (id TEXT NOT NULL)"))

    def bills(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(text("SELECT id FROM bills")).scalars())

    def audit(self) -> list[dict[str, Any]]:
        with self.engine.connect() as connection:
            rows = connection.execute(
                text("SELECT operator, action, details FROM onceward_audit ORDER BY seq")
            )
            return [{**row, "details": json.loads(row["details"])} for row in rows.mappings()]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return commands.onceward("end-worker", *arguments, cwd=self.directory, env=dict(os.environ))


@pytest.fixture(params=["threads", "asyncio"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> StuckSite:
    return StuckSite(tmp_path, request.param)


def process_of(run: Run) -> dict[str, Any]:
    [worker] = json.loads(run.get("/progress")[1])["workers"]
    return dict(worker)


def test_the_command_ends_the_process_and_everything_gets_home_once(site: StuckSite) -> None:
    site.send({"id": "a", "hangs": True})
    with site.run("--health", "127.0.0.1:0") as run:
        until(lambda: site.begun == ["a"])
        worker = until(lambda: (found := process_of(run))["process"] and found)
        name = f"{worker['pid']}.{worker['process']}"
        database = f"sqlite:///{site.directory}/shop.db"
        done = site.command(
            name, "--reason", "it hangs", "--grace", "0.5", "--database", database, "--operator", "ann"
        )
        assert done.returncode == 0, done.stderr
        assert f"pid {worker['pid']}, was killed" in done.stdout
        (site.directory / "fixed").touch()
        site.send({"id": "b"})
        until(lambda: site.bills() == ["a", "b"])
        assert site.begun.count("a") >= 2, "it was started again"
        [entry] = site.audit()
        assert (entry["operator"], entry["action"]) == ("ann", "end_worker")
        assert entry["details"]["reason"] == "it hangs"
        again = site.command(name, "--reason", "it hangs", "--database", database)
        assert again.returncode == 2
        assert "has ended" in again.stderr or "no process" in again.stderr
        assert len(site.audit()) == 1


def test_the_supervisor_blames_no_consumer_for_what_the_command_ended(tmp_path: Path) -> None:
    """As after an end from the console: every consumer stays where it is, and the next process starts at once."""
    site = StuckSite(tmp_path)
    with (tmp_path / "shop.py").open("a") as code:
        code.write('\n@app.consumer("sqlite:///mails.db")\ndef notify(mail: dict) -> None: ...\n')
    site.send({"id": "a", "hangs": True})
    with site.run("--health", "127.0.0.1:0") as run:
        for times in (1, 2, 3):
            until(lambda number=times: site.begun == ["a"] * number)
            worker = until(lambda: (found := process_of(run))["process"] and found["consumers"] and found)
            assert {each["consumer"] for each in worker["consumers"]} >= {"charge", "notify"}
            ended = site.command(str(worker["pid"]), "--reason", "it hangs", "--grace", "0.2")
            assert "was killed" in ended.stdout, ended.stderr
            until(lambda last=worker: process_of(run)["pid"] not in (None, last["pid"]))
        until(lambda: site.begun == ["a"] * 4)
        assert process_of(run)["restarts"] == 3
        said = [each["message"] for each in run.lines if each["level"] in ("warning", "error")]
        assert said == ["worker 1 was ended with `onceward end-worker`; restarting"] * 3
        (tmp_path / "fixed").touch()
        until(lambda: site.bills() == ["a"])


def test_the_command_ends_only_workers_and_only_the_one_that_is_named(tmp_path: Path) -> None:
    site = StuckSite(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        refused = site.command(str(other.pid), "--reason", "r")
        assert (refused.returncode, "is not a worker" in refused.stderr) == (2, True)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    with site.run("--health", "127.0.0.1:0") as run:
        pid = until(lambda: process_of(run)["pid"])
        refused = site.command(f"{pid}.000000000000", "--reason", "r")
        assert (refused.returncode, "is another worker now" in refused.stderr) == (2, True)
        assert site.command(str(pid)).returncode == 2, "without a reason"
        assert site.command(str(pid), "--reason", " ").returncode == 2
        assert process_of(run)["pid"] == pid
        ended = site.command(str(pid), "--reason", "just so", "--json")
        assert json.loads(ended.stdout) == {"worker": 1, "pid": pid, "killed": False, "audited": False}
        until(lambda: process_of(run)["pid"] not in (None, pid))


def test_the_command_notes_it_as_soon_as_another_worker_lets_go_of_the_database(tmp_path: Path) -> None:
    site = StuckSite(tmp_path)
    with site.run("--health", "127.0.0.1:0") as run:
        pid = until(lambda: process_of(run)["ready"] and process_of(run)["pid"])
        database = f"sqlite:///{site.directory}/shop.db"
        with sqlite3.connect(site.directory / "shop.db", check_same_thread=False) as other:
            other.execute("BEGIN IMMEDIATE")
            threading.Timer(8.0, other.rollback).start()  # longer than a statement waits
            ended = site.command(str(pid), "--reason", "it hangs", "--grace", "0", "--database", database)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [entry["details"]["pid"] for entry in site.audit()] == [pid]


def test_a_database_that_cannot_have_the_audit_is_refused_before_anything_is_ended(tmp_path: Path) -> None:
    site = StuckSite(tmp_path)
    with site.run("--health", "127.0.0.1:0") as run:
        pid = until(lambda: process_of(run)["ready"] and process_of(run)["pid"])
        nowhere = f"sqlite:///{site.directory}/nowhere.db"
        refused = site.command(str(pid), "--reason", "it hangs", "--grace", "0", "--database", nowhere)
        assert refused.returncode == 2, refused.stderr
        assert process_of(run)["pid"] == pid


def test_the_command_does_not_say_that_nothing_was_changed_if_the_audit_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = StuckSite(tmp_path)
    DeadLetters(site.engine).migrate()
    impatient = create_engine(site.engine.url, connect_args={"timeout": 0.1})
    monkeypatch.setattr(commands_of_run, "NOTE_PATIENCE", 0.3)
    with sqlite3.connect(site.directory / "shop.db") as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(typer.Exit) as ended:
            commands_of_run.note_end(impatient, "ann", {"pid": 4711}, False)
    assert ended.value.exit_code == 1
    assert "process 4711 was ended, but the audit does not have it: " in capsys.readouterr().err
    assert site.audit() == []


@pytest.mark.parametrize("given", ["x", "", "-1", "0", "1e3", "99999999999", "٣"])
def test_what_is_not_a_pid_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError):
        ForeignWorker(given)


# ── the supervisor ──────────────────────────────────────────────────────────────────────────────────────


def assignment() -> Assignment:
    return Assignment(
        target="shop:app", number=0, drain=False, grace=60.0, log_format="json", log_level="info", env=None,
        concurrency=None,
    )  # fmt: skip


async def nothing() -> None: ...


def test_the_supervisor_ends_the_process_that_is_meant_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = StuckSite(tmp_path)
    site.send({"id": "a", "hangs": True})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervising, "END_PATIENCE", 0.5)
    noted: list[bool] = []

    async def story() -> None:
        made = Supervisor(assignment(), 1)
        running = asyncio.ensure_future(made.run())
        [place] = made.places
        await until_async(lambda: site.begun == ["a"])
        first = place.process
        assert first is not None

        async def note() -> None:
            await first.ends_within(30)
            await asyncio.sleep(0.3)
            noted.append(place.process is None)

        assert made.end_worker(1, "another", END, nothing) is EndAnswer.GONE
        assert made.end_worker(2, first.name, END, nothing) is EndAnswer.GONE
        assert made.end_worker(1, first.name, END, note) is EndAnswer.BEGUN
        assert made.end_worker(1, first.name, END, nothing) is EndAnswer.UNDER_WAY
        assert place.ending == END
        await until_async(lambda: place.process not in (None, first))
        assert noted == [True], "the next one waits for it"
        second = place.process
        assert second is not None
        assert made.end_worker(1, first.name, END, nothing) is EndAnswer.GONE
        assert (place.ending, second.has_ended, place.restarts) == (None, False, 1)
        assert place.problem is None, "it was no crash"
        made.on_signal(15)
        assert made.end_worker(1, second.name, END, nothing) is EndAnswer.STOPPING
        made.on_signal(15)
        made.on_signal(15)
        await running

    asyncio.run(story())


def test_others_in_the_process_may_finish_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes a moment is done once; one that hangs is cut off, and comes again at once."""
    site = StuckSite(tmp_path)
    site.send({"id": "slow", "hangs": True})
    monkeypatch.chdir(tmp_path)

    async def story() -> None:
        made = Supervisor(assignment(), 1)
        running = asyncio.ensure_future(made.run())
        [place] = made.places
        await until_async(lambda: site.begun == ["slow"])
        process = place.process
        assert process is not None
        began = time.monotonic()
        made.end_worker(1, process.name, END, nothing)
        await asyncio.sleep(0.5)
        (tmp_path / "fixed").touch()
        await until_async(lambda: place.process not in (None, process))
        assert time.monotonic() - began < supervising.END_PATIENCE + 4
        assert site.bills() == ["slow"]
        assert site.begun == ["slow"]
        made.on_signal(15)
        await running

    asyncio.run(story())


def test_a_note_that_fails_or_takes_too_long_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    StuckSite(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervising, "NOTED_WITHIN", 0.2)

    async def fails() -> None:
        raise OSError("the disk is full")

    async def hangs() -> None:
        await asyncio.sleep(60)

    async def story() -> None:
        made = Supervisor(assignment(), 1)
        running = asyncio.ensure_future(made.run())
        [place] = made.places
        for restarts, note in enumerate((fails, hangs), start=1):
            await until_async(lambda: place.process is not None and place.process.status is not None)
            process = place.process
            assert process is not None
            made.end_worker(1, process.name, END, note)
            await until_async(lambda number=restarts: place.restarts == number)
        await until_async(lambda: place.process is not None)
        made.on_signal(15)
        await running

    asyncio.run(story())
    assert sum("could not be noted in time" in each.message for each in caplog.records) == 2


# ── poison ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_message_whose_process_is_ended_again_and_again_is_taken_for_poison(site: StuckSite) -> None:
    """As the page says: it becomes a dead letter, and others in its process get home."""
    code = (site.directory / "shop.py").read_text()
    (site.directory / "shop.py").write_text(code.replace("poison_after=9", "poison_after=2"))
    site.send({"id": "a", "hangs": True}, {"id": "b"})
    with site.run("--health", "127.0.0.1:0", "--console", "127.0.0.1:0") as run:
        until(lambda: run.has_said("console at "))
        console = next(line["message"].split()[2] for line in run.lines if "console at " in line["message"])
        for number in (1, 2):
            until(lambda times=number: site.begun.count("a") == times)
            with httpx.Client(base_url=console, follow_redirects=True) as browser:
                worker = until(
                    lambda: (found := process_of(run))["process"] and not found["starting"] and found
                )
                end = f"/workers/{worker['worker']}/end"
                browser.get(end, params={"process": worker["process"], "consumer": "charge"})
                form = {"process": worker["process"], "consumer": "charge", "reason": "it hangs"}
                page = browser.post(end, data={**form, "csrf": browser.cookies["onceward_csrf"]})
                assert "The process was asked to end" in page.text
            until(lambda last=worker: process_of(run)["pid"] not in (None, last["pid"]))
        until(lambda: [each.category for each in DeadLetters(site.engine).find()] == [Category.POISON])
        until(lambda: site.bills() == ["b"])
        assert site.begun.count("a") == 2
        assert [entry["action"] for entry in site.audit()] == ["end_worker"] * 2
