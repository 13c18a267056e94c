"""`onceward verify --all`: every consumer of an app, in processes of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import pytest

from tests.support import commands

APP = """
import os
from pathlib import Path

from onceward import Contract, Onceward, Transaction

app = Onceward("shop", database="sqlite:///shop.db")
EVENTS = [Transaction(id="o1", payload={"total": 3}, metadata={"event_type": "order"})]
OPTIONS = {"events": EVENTS, "only": ["duplicates"]}


def contract(name):
    return Contract(consumer_id=name, event_types=["*"], owner_team="shop", idempotency_mechanism="one transaction")


def tables(engine):
    with Path("verified.txt").open("a") as lines:
        lines.write(f"{os.getppid()}\\n")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE charges (total INTEGER)")


@app.consumer("memory://a", contract=contract("sync"), verification={**OPTIONS, "setup": tables})
def sync(order: dict, session) -> None:
    session.execute("INSERT INTO charges VALUES (3)")


@app.consumer("memory://b", contract=contract("aio"), verification={**OPTIONS, "setup": tables})
async def aio(order: dict, session) -> None:
    await session.execute("INSERT INTO charges VALUES (3)")


@app.consumer("memory://c")
def plain(order: dict) -> None: ...
"""
WRONG = """

@app.consumer("memory://d", contract=contract("wrong"), verification={**OPTIONS, "setup": tables})
def wrong(order: dict, session) -> None:
    raise LookupError("this one fails")
"""
UNFIT = """

@app.service
def payments() -> Path:
    raise AssertionError("opened")


@app.consumer("memory://e", contract=contract("unfit"), verification={**OPTIONS, "setup": tables})
def unfit(order: dict, payments: Path, session) -> None: ...
"""


def verify(directory: Path, code: str, *options: str) -> CompletedProcess[str]:
    (directory / "shop.py").write_text(code)
    return commands.onceward("verify", "shop:app", *options, cwd=directory, env=os.environ)


@pytest.mark.req("CC-067")
def test_every_consumer_is_verified_in_its_own_process_and_recorded(tmp_path: Path) -> None:
    migrate = ("inbox", "migrate", "--database", "sqlite:///shop.db")
    assert commands.onceward(*migrate, cwd=tmp_path, env=os.environ).returncode == 0
    result = verify(tmp_path, APP, "--all", "--record")
    assert result.returncode == 1, "it passed, but two scenarios prove nothing"
    assert "a partial verification does not open production" in result.stdout
    assert "2 of 2 consumers passed in" in result.stdout
    assert "; recorded" in result.stdout
    assert "Not verified, because they have no contract: plain" in result.stdout
    assert len(set((tmp_path / "verified.txt").read_text().split())) == 2, "two processes"
    asked = verify(tmp_path, APP, "--all", "--env", "production", "--json")
    verdicts = json.loads(asked.stdout)["consumers"]
    assert len(verdicts) == 2
    assert all("never verified" not in str(each["missing"]) for each in verdicts)


@pytest.mark.req("CC-067")
def test_one_that_fails_is_shown_with_its_findings_and_the_others_are_verified(tmp_path: Path) -> None:
    result = verify(tmp_path, APP + WRONG, "--all", "--junit", "junit.xml")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "2 of 3 consumers passed" in result.stdout
    assert "LookupError: this one fails" in result.stdout
    rows = {line.split()[0]: line.split()[1] for line in result.stdout.splitlines() if len(line.split()) == 6}
    assert {name: rows[name] for name in ("sync", "aio", "wrong")} == {
        "sync": "passed", "aio": "passed", "wrong": "FAILED",
    }  # fmt: skip
    suites = list(ElementTree.parse(tmp_path / "junit.xml").getroot())
    assert [suite.get("failures") for suite in suites] == ["0", "0", "1"]


@pytest.mark.req("CC-066", "CC-067")
def test_one_that_cannot_be_verified_ends_with_2_and_says_why_as_json_too(tmp_path: Path) -> None:
    result = verify(tmp_path, APP + UNFIT, "--all", "--json")
    assert result.returncode == 2, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["passed"] is False
    by_name = {each["consumer"]: each for each in report["consumers"]}
    assert by_name["sync"]["passed"]
    assert by_name["aio"]["scenarios"][0]["result"] == "passed"
    assert "unfit takes the real payments (shop.py:" in by_name["unfit"]["problem"]


@pytest.mark.req("CC-067")
@pytest.mark.parametrize(
    ("code", "options", "words"),
    [
        (APP, ["--all", "--contract", "shop:contract"], "belong to one consumer, not to --all"),
        (APP, ["--all", "--events", "events.jsonl"], "belong to one consumer, not to --all"),
        (
            "from onceward import Onceward\napp = Onceward('shop')\n",
            ["--all"],
            "no consumer of shop:app has a contract",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, code: str, options: list[str], words: str) -> None:
    result = verify(tmp_path, code, *options)
    assert (result.returncode, words in result.stderr) == (2, True), result.stderr
