"""`onceward dlq` and `onceward audit`, as operators and scripts use them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from typer.testing import CliRunner, Result

from onceward.cli.dlq.options import seconds
from onceward.cli.main import app
from onceward.deadletters import Category, DeadLetters, Filter, Status
from onceward.deadletters.burial import burial_of
from onceward.inbox import Inbox
from tests.support.deadletters.world import burial, contract, order

WIDE = {"COLUMNS": "250", "NO_COLOR": "1"}
CAUSE = ["--cause-category", "infrastructure", "--root-cause", "ledger down", "--fix-ref", "v2"]
OF_TYPE = ["--consumer", "billing", "--type", "order.paid"]
SHOP = "tests.support.deadletters.shop"


class Desk:
    """An operator's terminal."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        self.engine = create_engine(self.url)
        self.letters = DeadLetters(self.engine)
        self.letters.migrate()
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE bills (id text PRIMARY KEY, amount integer)"))
        Inbox(self.engine).register(contract())
        self.letters.bury(
            burial_of(order("o1"), consumer="billing", error=ConnectionError("ledger down")),
            burial_of(order("o2"), consumer="billing", error=ConnectionError("ledger down")),
            burial("killer", category=Category.POISON, body=b"\x00\xff"),
            burial("sent", consumer="shipping", event_type="order.sent", error="no such street"),
        )

    def run(self, *arguments: str, database: str | None = None) -> Result:
        environment = {**WIDE, "ONCEWARD_DATABASE": database or self.url}
        return CliRunner().invoke(app, arguments, env=environment)

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "letters.db")
    yield made
    made.engine.dispose()


def test_letters_are_listed_by_filters(desk: Desk) -> None:
    result = desk.run("dlq", "list")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("billing", "order.sent", "poison", "no such street"))
    assert [each["message_id"] for each in desk.json("dlq", "list", *OF_TYPE)] == ["o1", "o2", "killer"]
    assert [each["message_id"] for each in desk.json("dlq", "list", "--category", "poison")] == ["killer"]
    assert [each["message_id"] for each in desk.json("dlq", "list", "--text", "STREET")] == ["sent"]
    assert [each["message_id"] for each in desk.json("dlq", "list", "--id", "1", "--id", "4")] == [
        "o1",
        "sent",
    ]
    assert desk.json("dlq", "list", "--older-than", "2h") == []
    assert len(desk.json("dlq", "list", "--younger-than", "2h", "--status", "open")) == 4
    assert len(desk.json("dlq", "list", "--limit", "2")) == 2
    assert "2 more" in desk.run("dlq", "list", "--limit", "2").stdout
    nothing = desk.run("dlq", "list", "--consumer", "nobody")
    assert nothing.exit_code == 0
    assert (
        nothing.stdout
        == "No dead letter matches: 'nobody' has none; the consumers that do are billing, shipping.\n"
    )
    assert desk.run("dlq", "list", *OF_TYPE, "--text", "unheard").stdout == "No dead letter matches.\n"


def test_a_store_without_letters_says_that_there_are_none(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/empty.db")
    DeadLetters(engine).migrate()
    engine.dispose()
    listed = CliRunner().invoke(app, ["dlq", "list", "--database", f"sqlite:///{tmp_path}/empty.db"])
    assert (listed.exit_code, listed.stdout) == (0, "No dead letters.\n")


@pytest.mark.parametrize("width", [80, 100])
def test_a_list_fits_a_terminal_and_says_what_was_raised(desk: Desk, width: int) -> None:
    died = order("3fa85f64b3fc2c963f66afa6")
    reported = f"SYSTEM [{died.id}]: ValueError: no such account"  # as the engine stores it
    desk.letters.bury(burial_of(died, consumer="billing", error=reported))
    lines = on_terminal(desk, width, "dlq", "list")
    assert max(map(len, lines)) <= width
    heading = next(line.split() for line in lines if line.strip())
    assert heading == ["id", "consumer", "type,", "category", "deliveries", "dead", "for", "error"]
    text = " ".join(" ".join(lines).split())
    assert "ValueError: no such" in text
    assert died.id not in text
    assert "infrastructure" in text, "no word is broken"
    desk.json("dlq", "hold", "--id", "1", "--reason", "case 7")
    desk.json("dlq", "discard", "--id", "2", "--reason", "by hand", "--yes")
    text = "\n".join(on_terminal(desk, width, "dlq", "list"))
    assert "held: case 7" in text
    assert re.search(r"category +status +deliveries", text)
    assert re.search(r"infrastructure\b", text), "no word is broken"
    assert [each for each in ("open", "discarded") if each not in text] == []


@pytest.mark.parametrize("command", [["dlq", "redrives"], ["audit", "list"], ["inbox", "stats"]])
def test_every_table_fits_a_terminal_of_80_columns_with_its_words_whole(
    desk: Desk, command: list[str]
) -> None:
    desk.json("dlq", "redrive", *OF_TYPE, *CAUSE, "--yes", "--operator", "ann")
    lines = on_terminal(desk, 80, *command)
    assert max(map(len, lines)) <= 80
    for word in {"redrives": ("succeeded", "infrastructure"), "list": ("details",), "stats": ("unended",)}[
        command[1]
    ]:
        assert word in "\n".join(lines)


def on_terminal(desk: Desk, width: int, *arguments: str) -> list[str]:
    environment = {"ONCEWARD_DATABASE": desk.url, "COLUMNS": str(width), "FORCE_COLOR": "1"}
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines()]


# ── the database ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without settings."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("ONCEWARD_DATABASE", raising=False)
    return tmp_path / "here"


COMMANDS = [["dlq", "list"], ["inbox", "stats"], ["audit", "list"], ["consumers", "list"]]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("file", "text_"),
    [
        ("onceward.toml", 'database = "{url}"'),
        ("pyproject.toml", '[tool.onceward]\ndatabase = "{url}"'),
        (".env", "ONCEWARD_DATABASE={url}"),
    ],
)
def test_the_database_may_be_named_by_a_file(
    desk: Desk, elsewhere: Path, command: list[str], file: str, text_: str
) -> None:
    (elsewhere / file).write_text(text_.format(url=desk.url))
    result = CliRunner().invoke(app, command, env=WIDE)
    assert result.exit_code == 0, result.output


@pytest.mark.req("IN-20")
def test_the_database_may_be_a_secret(desk: Desk, elsewhere: Path) -> None:
    (elsewhere / "onceward_database").write_text(desk.url)
    result = CliRunner().invoke(app, ["dlq", "list"], env={**WIDE, "ONCEWARD_SECRETS_DIR": "."})
    assert result.exit_code == 0, result.output


def test_the_option_wins_over_the_environment_and_that_over_a_file(desk: Desk, elsewhere: Path) -> None:
    (elsewhere / "onceward.toml").write_text('database = "sqlite:///of_file.db"')
    variable = {**WIDE, "ONCEWARD_DATABASE": "sqlite:///of_variable.db"}
    assert "/of_file.db" in CliRunner().invoke(app, ["dlq", "list"], env=WIDE).stderr
    assert "/of_variable.db" in CliRunner().invoke(app, ["dlq", "list"], env=variable).stderr
    given = CliRunner().invoke(app, ["dlq", "list", "--database", desk.url], env=variable)
    assert given.exit_code == 0
    (elsewhere / "onceward.toml").write_text("nonsense")
    given = CliRunner().invoke(app, ["dlq", "list", "--database", desk.url], env=variable)
    assert given.exit_code == 0, "no file is read if the option names a database"
    broken = CliRunner().invoke(app, ["dlq", "list"], env=WIDE)
    assert (broken.exit_code, "onceward.toml is not valid TOML" in broken.stderr) == (2, True)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_database_all_ways_to_name_one_are_said(elsewhere: Path, command: list[str]) -> None:
    result = CliRunner().invoke(app, command, env=WIDE)
    assert result.exit_code == 2
    for way in ("--database", "ONCEWARD_DATABASE", "onceward.toml", "[tool.onceward]"):
        assert way in result.stderr
    shown = CliRunner().invoke(app, [*command, "--help"], env=WIDE).stdout
    assert "ONCEWARD_DATABASE, or database in onceward.toml or pyproject.toml" in shown


# ── letters ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_letter_is_shown_with_history_and_body(desk: Desk) -> None:
    shown = desk.run("dlq", "show", "1")
    assert shown.exit_code == 0
    assert "ConnectionError: ledger down" in shown.stdout
    assert "'amount': 7" in shown.stdout
    assert re.search(r"deliveries +1\b", shown.stdout)
    assert desk.json("dlq", "show", "1")["payload"] == {"amount": 7}
    assert "payload" not in desk.json("dlq", "show", "3"), "it cannot be read"
    assert "00 ff" in desk.run("dlq", "show", "3").stdout
    assert desk.run("dlq", "show", "3", "--raw").stdout_bytes == b"\x00\xff"
    assert base64.b64decode(desk.json("dlq", "show", "3")["body"]) == b"\x00\xff"
    missing = desk.run("dlq", "show", "99")
    assert (missing.exit_code, "dead letter 99 does not exist" in missing.stderr) == (1, True)


@pytest.mark.req("CC-052")
def test_a_redrive_is_made_once_and_followed(desk: Desk) -> None:
    made = desk.run("dlq", "redrive", *OF_TYPE, *CAUSE, "--yes", "--operator", "ann", "--redrive-id", "click")
    assert made.exit_code == 0, made.output
    assert "Redrive click: 2 letters at 100 per minute" in made.stdout
    assert "billing gets them while it runs: `onceward run" in made.stdout.splitlines()[-1]
    again = desk.json("dlq", "redrive", *OF_TYPE, *CAUSE, "--yes", "--redrive-id", "click")
    assert (again["repeated"], again["letters"]) == (True, 2)
    seen = desk.json("dlq", "redrives")
    assert [seen["redrives"][0][name] for name in ("id", "letters", "waiting", "operator")] == [
        "click",
        2,
        2,
        "ann",
    ]
    assert seen["rcas"][0]["root_cause"] == "ledger down"
    assert "click" in desk.run("dlq", "redrives").stdout
    sent = ["--consumer", "shipping", "--type", "order.sent"]
    assert desk.json("dlq", "redrive", *sent, "--rca", "1", "--yes")["rca_id"] == 1


@pytest.mark.req("CC-052")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([*OF_TYPE, "--yes"], 1, "needs a root cause"),
        ([*OF_TYPE, "--yes", "--cause-category", "business"], 1, "root_cause is empty"),
        ([*OF_TYPE, "--yes", *CAUSE[:4]], 1, "fix_ref is empty"),
        ([*OF_TYPE, "--yes", "--rca", "7"], 1, "there is no RCA 7"),
        ([*OF_TYPE, "--yes", "--rca", "7", *CAUSE], 2, "not both"),
        (["--consumer", "billing", "--yes", *CAUSE], 1, "needs a filter"),
        (["--type", "order.paid", "--yes", *CAUSE], 1, "name it in the filter"),
        (["--consumer", "billing", "--category", "poison", "--yes", *CAUSE], 1, "--poison-fixed"),
        ([*OF_TYPE, "--yes", *CAUSE, "--rate", "1001"], 1, "from 1 to 1000"),
        (
            [*OF_TYPE, "--yes", "--cause-category", "magic", *CAUSE[2:]],
            2,
            "one of infrastructure, contract, business, in_doubt, poison, not 'magic'",
        ),
        (
            ["--consumer", "biling", "--type", "order.paid", *CAUSE],
            1,
            "there are letters of billing, shipping",
        ),
        (
            ["--consumer", "biling", "--type", "order.paid", "--dry-run", "--task", f"{SHOP}:charge"],
            2,
            "is consumer 'billing', but the letters belong to 'biling'",
        ),
        (
            ["--consumer", "billing", "--text", "unheard", "--yes", *CAUSE],
            1,
            "no open letter that can be redriven matches",
        ),
        ([*OF_TYPE, *CAUSE], 2, "--yes"),
        ([*OF_TYPE, "--older-than", "soon", "--yes", *CAUSE], 2, "not a duration"),
        ([*OF_TYPE, "--category", "magic", "--yes", *CAUSE], 2, "one of infrastructure"),
        ([*OF_TYPE, "--dry-run"], 2, "--task"),
    ],
)
def test_a_redrive_is_refused_in_one_line(desk: Desk, arguments: list[str], code: int, says: str) -> None:
    result = desk.run("dlq", "redrive", *arguments)
    assert result.exit_code == code, result.output
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert desk.letters.count(Filter(status="open")) == 4


def test_on_a_terminal_it_asks(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceward.cli.dlq.options.typer.confirm", lambda _: False)
    monkeypatch.setattr(
        "onceward.cli.dlq.options.sys", type("Sys", (), {"stdin": type("In", (), {"isatty": lambda: True})})
    )
    refused = desk.run("dlq", "discard", "--id", "1", "--reason", "by hand")
    assert (refused.exit_code, "Nothing was done" in refused.stderr) == (1, True)
    monkeypatch.setattr("onceward.cli.dlq.options.typer.confirm", lambda _: True)
    assert desk.run("dlq", "discard", "--id", "1", "--reason", "by hand").exit_code == 0
    assert desk.letters.count(Filter(status=Status.DISCARDED)) == 1


def test_letters_are_discarded_held_released_and_purged(desk: Desk) -> None:
    assert desk.json("dlq", "hold", "--id", "1", "--reason", "case 7") == {"held": 1, "held_before": 0}
    assert desk.json("dlq", "discard", "--consumer", "billing", "--reason", "by hand", "--yes") == {
        "discarded": 2,
        "on_hold": 1,
    }
    assert desk.json("dlq", "release", "--id", "1", "--reason", "closed") == {"released": 1}
    nothing = desk.run("dlq", "discard", "--id", "99", "--reason", "by hand", "--yes")
    assert (nothing.exit_code, nothing.stderr) == (1, "No letter matches.\n")
    unasked = desk.run("dlq", "discard", "--id", "99", "--reason", "by hand")
    assert (unasked.exit_code, unasked.stderr) == (1, "No letter matches.\n")
    unfiltered = desk.run("dlq", "hold", "--reason", "all")
    assert (unfiltered.exit_code, "give a filter" in unfiltered.stderr) == (2, True)
    assert desk.json("dlq", "purge", "--yes") == {"removed": 0}


def test_an_export_has_everything_and_is_audited(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "letters.jsonl"
    result = desk.run("dlq", "export", str(file), "--consumer", "billing", "--operator", "ann")
    assert (result.exit_code, "3 letters written" in result.stdout) == (0, True)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["message_id"] for line in lines] == ["o1", "o2", "killer"]
    for line in lines:
        body = base64.b64decode(line["body"])
        assert hashlib.sha256(body).hexdigest() == line["digest"]
        assert body == desk.letters.body(line["id"])
    assert desk.run("dlq", "export", str(file)).exit_code == 2, "it exists"
    empty = desk.run("dlq", "export", str(tmp_path / "none"), "--consumer", "nobody")
    assert (empty.exit_code, (tmp_path / "none").exists()) == (1, False)
    unwritable = desk.run("dlq", "export", str(tmp_path / "no" / "folder"))
    assert (unwritable.exit_code, "cannot be written" in unwritable.stderr) == (1, True)
    [line] = [each for each in desk.json("audit", "list") if each["action"] == "export"]
    assert (line["operator"], line["details"]["letters"]) == ("ann", 3), "and nothing of those that failed"


@pytest.mark.req("RN-11")
def test_an_export_is_private_and_follows_no_planted_symlink(desk: Desk, tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "letters.jsonl"
    victim.write_text("mine")
    for planted in ("letters.jsonl.part", "dangling"):
        (tmp_path / planted).symlink_to(victim if planted != "dangling" else tmp_path / "nowhere")
    before = os.umask(0)
    try:
        assert desk.run("dlq", "export", str(file)).exit_code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    refused = desk.run("dlq", "export", str(tmp_path / "dangling"))
    assert (refused.exit_code, "exists already" in refused.stderr) == (2, True)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.req("CC-052")
@pytest.mark.parametrize(
    "task", ["Bill", "AsyncBill", "make_bill", "charge", "app.consumers.charge", "charge_card"]
)
def test_a_dry_run_shows_outcomes_and_rows_and_changes_nothing(desk: Desk, task: str) -> None:
    with desk.engine.begin() as connection:
        connection.execute(text("INSERT INTO bills VALUES ('o2', 1)"))
    arguments = ["dlq", "redrive", *OF_TYPE, "--dry-run", "--task", f"{SHOP}:{task}"]
    shown = desk.run(*arguments)
    assert shown.exit_code == 1, "one of them would fail again"
    assert "would succeed" in shown.stdout
    assert "insert bills: 1" in shown.stdout
    assert "+ bills: id='o1', amount=7" in shown.stdout
    assert "IntegrityError" in shown.stdout
    assert "--poison-fixed" in shown.stdout
    assert desk.run(*arguments, "--id", "1").exit_code == 0
    reported = json.loads(desk.run(*arguments, "--json").stdout)
    assert [each["outcome"] for each in reported] == ["succeed", "raise", "breach"]
    with desk.engine.connect() as connection:
        assert connection.execute(text("SELECT id FROM bills")).scalars().all() == ["o2"]
        for table in ("dedup", "attempts", "redrives", "audit"):
            assert connection.execute(text(f"SELECT count(*) FROM onceward_{table}")).scalar() == 0
    assert desk.letters.count(Filter(status="open")) == 4


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("nowhere:Bill", "cannot be imported"),
        (f"{SHOP}:Nothing", "has no Nothing"),
        (f"{SHOP}:not_a_task", "must name"),
        (f"{SHOP}:app", "as in shop:charge"),
        (f"{SHOP}:app.consumer", "without parameters"),
    ],
)
def test_a_task_that_is_not_there_is_said_in_one_line(desk: Desk, task: str, says: str) -> None:
    result = desk.run("dlq", "redrive", *OF_TYPE, "--dry-run", "--task", task)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_the_audit_is_listed_and_verified(desk: Desk) -> None:
    assert desk.run("audit", "list").stdout == "The log is empty.\n"
    desk.json("dlq", "hold", "--id", "1", "--reason", "case 7", "--operator", "ann")
    desk.json("dlq", "release", "--id", "1", "--reason", "closed", "--operator", "bob")
    listed = desk.run("audit", "list")
    assert "ann" in listed.stdout
    fine = desk.run("audit", "verify")
    assert (fine.exit_code, "2 rows, unchanged" in fine.stdout) == (0, True)
    with desk.engine.begin() as connection:
        connection.execute(text("DROP TRIGGER onceward_audit_is_not_changed"))
        connection.execute(text("UPDATE onceward_audit SET operator = 'eve' WHERE seq = 1"))
    broken = desk.run("audit", "verify")
    assert broken.exit_code == 1
    assert broken.stderr == "The log is broken at row 1: it was changed.\n"
    as_json = desk.run("audit", "verify", "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["broken"]["row"]) == (1, 1)


@pytest.mark.parametrize("command", [["dlq", "list"], ["dlq", "redrives"], ["audit", "verify"]])
def test_databases_that_cannot_be_used_are_reported_in_one_line(
    desk: Desk, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "empty.db").touch()
    for url, code in (
        (f"sqlite:///{tmp_path}/missing.db", 2),
        (f"sqlite:///{tmp_path}/empty.db", 2),
        ("postgresql://nobody@127.0.0.1:1/none", 1),
        ("nonsense", 2),
    ):
        result = desk.run(*command, database=url)
        assert result.exit_code == code, (url, result.output)
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stdout == ""


def test_spans_of_time() -> None:
    assert [seconds(each) for each in ("90", "90s", "15m", "2h", "1.5d")] == [90, 90, 900, 7200, 129600]


def test_the_help_is_fast_because_it_loads_nothing_heavy() -> None:
    code = "import sys, onceward.cli.main; print([*sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "sqlalchemy" not in done.stdout
    assert "onceward.deadletters" not in done.stdout
