"""`onceward run`: what it runs, which settings win, and its messages about mistakes."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onceward.cli.main import app as command
from onceward.connectors import SqliteConnector
from onceward.transaction import Transaction
from tests.support import commands
from tests.support.run.world import Site
from tests.support.wait import until

MODES = pytest.mark.parametrize("mode", ["threads", pytest.param("asyncio", marks=pytest.mark.long)])
TWO_KINDS = """
import logging, threading
from onceward import Onceward

app = Onceward("shop", processes=3)
log = logging.getLogger("shop")


@app.consumer("sqlite:///a.db", policy={"loop": {"concurrency": {"value": 2}}})
def charge(order: dict) -> None:
    log.info("charging %s in %s", order["id"], threading.current_thread() is not threading.main_thread())


@app.consumer("sqlite:///b.db")
async def mail(order: dict) -> None:
    log.info("mailing %s", order["id"])
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; modules imported from there are unloaded afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def refused(*arguments: str, code: int = 2) -> str:
    """Its message when it does not start."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        result = CliRunner().invoke(command, ["run", *arguments], env={"COLUMNS": "200"})
    finally:
        logging.captureWarnings(False)
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    assert (result.exit_code, result.stdout) == (code, "")
    return result.stderr.strip()


# ── what it runs ────────────────────────────────────────────────────────────────────────────────────────


def test_all_consumers_of_an_app_run_in_each_process_and_every_log_line_says_where(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(TWO_KINDS)
    for name in ("a", "b"):
        with SqliteConnector(tmp_path / f"{name}.db") as queue:
            queue.dispatch_transactions([Transaction(id=name, payload={"id": f"{name}1"})])
    with site.run("--drain", "--processes", "1") as run:
        assert run.ended() == 0
        lines = {line["message"]: line for line in run.lines}
    assert "running charge, mail of shop in 1 process, as development" in lines
    charging, mailing = lines["charging a1 in True"], lines["mailing b1"]
    assert charging == charging | {"worker": 1, "task": "charge", "transaction_id": "a", "level": "info"}
    assert mailing == mailing | {"worker": 1, "task": "mail", "transaction_id": "b", "step": "process"}
    assert lines["worker 1: source is empty, exiting"]


@MODES
def test_options_win_over_what_the_app_says(tmp_path: Path, mode: str) -> None:
    site = Site(tmp_path, mode)
    site.send(*({"id": f"o{number}", "seconds": 60} for number in range(4)))
    with site.run(
        "--concurrency", "1", "--env", "test", "--processes", "2", "--health", "127.0.0.1:0"
    ) as run:
        until(lambda: len(site.begun) == 1)
        until(lambda: all(worker["ready"] for worker in json.loads(run.get("/progress")[1])["workers"]))
        assert run.says("in 2 processes, as test")
        assert len(site.begun) == 1, "the app's policy says four at once"


@MODES
def test_at_its_end_a_run_says_how_many_have_succeeded_and_failed(tmp_path: Path, mode: str) -> None:
    site = Site(tmp_path, mode)
    site.send({"id": "o1"}, {"id": "o2"}, {"id": "o3", "fail": True})
    later = "sqlite:///orders.db?redelivery_delay=600"  # than the second worker starts, however slowly
    with site.run("--drain", "--processes", "2", RUN_SOURCE=later) as run:
        assert run.ended() == 0
        *_, summary, hint = [line["message"] for line in run.lines]
    assert summary.endswith(" s; charge: 2 succeeded, 1 failed")
    assert hint == "to see what became of failed messages, run `onceward balance shop:app`"


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_names_no_app_is_refused_with_what_to_write(directory: Path) -> None:
    (directory / "shop1.py").write_text("from onceward import Onceward\napp = Onceward('shop')\nother = 3\n")
    assert refused("shop1") == "'shop1' does not name an app; write MODULE:NAME, as in shop1:app"
    assert refused("nowhere1:app").startswith(
        f"nowhere1 cannot be imported: there is no module 'nowhere1' in {directory}"
    )
    assert refused("shop1:ap") == "shop1 has no ap; its apps are app"
    assert refused("shop1:other").startswith(
        "shop1:other is not an app but int; name what Onceward(…) returned"
    )
    assert refused("shop1:app").startswith("shop has no consumers, so there is nothing to run")


def test_an_app_whose_module_cannot_be_imported_is_refused_with_the_reason(directory: Path) -> None:
    (directory / "shop2.py").write_text("import no_such_package\n")
    assert refused("shop2:app") == (
        f"shop2 cannot be imported: No module named 'no_such_package'; see {directory / 'shop2.py'}:1"
    )
    (directory / "shop3.py").write_text("1 / 0\n")
    reported = refused("shop3:app", code=1)
    assert "ZeroDivisionError" in reported
    assert "importlib" not in reported, "it begins with the user's own code"
    assert f'{directory / "shop3.py"}", line 1' in reported
    assert reported.endswith("shop3:app cannot be imported: see above")


def test_an_app_that_consumes_from_memory_is_refused(directory: Path) -> None:
    (directory / "shop4.py").write_text(
        "from onceward import Onceward\napp = Onceward('shop')\n"
        "@app.consumer('memory://orders')\ndef charge(order: dict) -> None: ...\n"
    )
    assert "charge of shop consumes from memory://" in refused("shop4:app")


@pytest.mark.parametrize(
    ("database", "reason"),
    [
        ("sqlite://", "the database of shop is in memory"),
        ("sqlite:///:memory:", "the database of shop is in memory"),
        ("sqlite:///file:x?mode=memory&uri=true", "the database of shop is in memory"),
        ("sqlite:///.", "the database of shop is a directory: "),
        ("postgresql://localhost/shop?bogus=1", "an option that PostgreSQL does not have: 'bogus'"),
    ],
)
def test_a_database_that_no_worker_can_use_is_refused_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, database: str, reason: str
) -> None:
    (directory / "shop7.py").write_text(TWO_KINDS)
    monkeypatch.setenv("ONCEWARD_DATABASE", database)
    assert reason in refused("shop7:app")


@pytest.mark.parametrize("health", ["8080", ":8080", "localhost", "127.0.0.1:http", "127.0.0.1:65536"])
def test_what_is_no_address_is_refused(directory: Path, health: str) -> None:
    (directory / "shop5.py").write_text(TWO_KINDS)
    assert refused("shop5:app", "--health", health).startswith(f"--health must be HOST:PORT, not {health!r}")


def test_a_port_that_is_in_use_is_refused_before_anything_is_started(directory: Path) -> None:
    (directory / "shop6.py").write_text(TWO_KINDS)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        reported = refused("shop6:app", "--health", address)
    assert f"--health: cannot listen on {address}" in reported
    assert not (directory / "a.db").exists()


def test_where_logs_are_json_a_refusal_is_too(directory: Path) -> None:
    (directory / "shop9.py").write_text(TWO_KINDS)
    reported = json.loads(refused("shop9:app", "--log-format", "json", "--health", "8080"))
    assert (reported["level"], reported["logger"]) == ("critical", "onceward.run")
    assert reported["message"].startswith("--health must be HOST:PORT")


def test_a_setting_that_cannot_be_is_refused_with_its_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "shop7.py").write_text(TWO_KINDS)
    monkeypatch.setenv("ONCEWARD_GRACE", "soon")
    assert refused("shop7:app").startswith("ONCEWARD_GRACE: grace: Input should be a valid number")


def test_a_policy_that_forbids_the_concurrency_is_refused(directory: Path) -> None:
    (directory / "shop8.py").write_text(TWO_KINDS.replace('"value": 2', '"value": 2, "max": 4'))
    assert "above max (4)" in refused("shop8:app", "--concurrency", "5")


@pytest.mark.parametrize("target", ["./shop:app", "shop.py:app", "./shop.py:app"])
def test_a_file_in_the_place_of_a_module_is_reported_apart(tmp_path: Path, target: str) -> None:
    ended = commands.onceward("run", target, cwd=tmp_path, env=os.environ)
    assert ended.returncode == 2
    assert "is a file; write its module: shop:app" in ended.stderr
