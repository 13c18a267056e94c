"""`onceward dlq edit`, `redrive --poison-fixed` and `list --group`, as operators use them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from typer.testing import CliRunner, Result

from onceward.cli.main import app
from onceward.deadletters import Category, DeadLetters, Filter
from onceward.deadletters.burial import burial_of
from onceward.inbox import Inbox
from tests.support.deadletters.world import burial, contract, order

SHOP = "tests.support.deadletters.shop"
CAUSE = ("--cause", "amount as text", "--operator", "ann", "--task", f"{SHOP}:Bill")


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/letters.db"
        self.engine = create_engine(self.url)
        self.letters = DeadLetters(self.engine)
        self.letters.migrate()
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE bills (id text PRIMARY KEY, amount integer NOT NULL)"))
        Inbox(self.engine).register(contract())
        self.letters.bury(
            burial_of(order("o1", {"amount": None}), consumer="billing", error=ValueError("no 7"))
        )

    def run(self, *arguments: str, editor: str = "", given: str | None = None) -> Result:
        environment = {"COLUMNS": "250", "NO_COLOR": "1", "ONCEWARD_DATABASE": self.url, "VISUAL": editor}
        environment["EDITOR"] = ""
        environment["TMPDIR"] = str(self.folder)
        return CliRunner().invoke(app, arguments, env=environment, input=given)

    def editor(self, python: str) -> str:
        """A command that edits the file at `path`."""
        script = self.folder / "editor.py"
        script.write_text(f"import json, sys\nfrom pathlib import Path\npath = Path(sys.argv[1])\n{python}\n")
        return f"{sys.executable} {script}"

    def file(self, content: str) -> str:
        path = self.folder / "payload.json"
        path.write_text(content)
        return str(path)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = Desk(tmp_path)
    yield made
    made.engine.dispose()


def shown(desk: Desk, *more: str) -> Any:
    return json.loads(desk.run("dlq", "show", "1", "--json", *more).stdout)


@pytest.mark.req("CC-082")
@pytest.mark.parametrize("task", ["Bill", "AsyncBill", "charge"])
def test_a_file_corrects_a_payload(desk: Desk, task: str) -> None:
    before = shown(desk)
    command = (*CAUSE[:-1], f"{SHOP}:{task}", "--file", desk.file('{"amount": 7}'))
    result = desk.run("dlq", "edit", "1", *command)
    assert result.exit_code == 0, result.output
    assert "Letter 1 is edited. With the new payload it would succeed." in result.stdout
    assert "--id 1 --cause-category infrastructure --root-cause … --fix-ref …" in result.stdout
    after = shown(desk)
    assert (after["payload"], after["body"], after["edited_by"]) == ({"amount": 7}, before["body"], "ann")
    assert shown(desk, "--original")["payload"] == {"amount": None}
    assert desk.run("dlq", "show", "1", "--raw", "--original").stdout_bytes == desk.letters.body(1)
    assert desk.run("dlq", "show", "1", "--raw").stdout_bytes == desk.letters.edited_body(1)
    table = desk.run("dlq", "show", "1").stdout
    assert "edited body (--original" in table
    assert "amount as text" in table
    assert "edited by ann" in desk.run("dlq", "list").stdout
    export = desk.folder / "out.jsonl"
    desk.run("dlq", "export", str(export))
    assert json.loads(export.read_text())["edited_body"] == after["edited_body"]


@pytest.mark.req("CC-082")
def test_an_editor_or_standard_input_does_as_well(desk: Desk) -> None:
    assert "edit" not in desk.run("dlq", "show", "1").stdout
    editor = desk.editor("path.write_text(path.read_text().replace('null', '7'))")
    assert desk.run("dlq", "edit", "1", *CAUSE, editor=editor).exit_code == 0
    assert shown(desk)["payload"] == {"amount": 7}
    result = desk.run("dlq", "edit", "1", *CAUSE, "--file", "-", "--json", given='{"amount": 8}')
    assert json.loads(result.stdout)["prediction"]["outcome"] == "succeed"
    assert shown(desk)["payload"] == {"amount": 8}
    assert list(desk.folder.glob("letter-*")) == [], "the temporary files are gone"


@pytest.mark.req("CC-082")
def test_an_unchanged_payload_changes_nothing(desk: Desk) -> None:
    result = desk.run("dlq", "edit", "1", *CAUSE, editor=desk.editor("pass"))
    assert (result.exit_code, "Nothing was changed" in result.stdout) == (0, True)
    result = desk.run("dlq", "edit", "1", *CAUSE, "--file", desk.file('{ "amount":null }'))
    assert (result.exit_code, "Nothing was changed" in result.stdout) == (0, True)
    assert desk.letters.audit() == []


@pytest.mark.req("CC-082")
@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("path.write_text('{ amount')", "this is not JSON"),
        ("path.write_text('{\"amount\": 9}'); sys.exit(3)", "ended with exit code 3"),
        (
            'path.write_text(\'{"amount": null, "b": 1}\')',
            "would die again with this payload: IntegrityError",
        ),
    ],
)
def test_a_refused_text_is_kept_for_another_try(desk: Desk, python: str, says: str) -> None:
    result = desk.run("dlq", "edit", "1", *CAUSE, editor=desk.editor(python))
    assert result.exit_code == 1
    assert says in result.stderr
    found = re.search(r"Your text is in (\S+);", result.stderr)
    assert found is not None
    assert "amount" in Path(found[1]).read_text()
    assert desk.letters.edited_body(1) is None


@pytest.mark.req("CC-082")
@pytest.mark.parametrize("python", ["path.unlink()", "path.write_text(' \\n')", "path.unlink(); sys.exit(3)"])
def test_an_editor_that_leaves_no_text_changes_nothing(desk: Desk, python: str) -> None:
    result = desk.run("dlq", "edit", "1", *CAUSE, editor=desk.editor(python))
    assert result.exit_code == 1
    assert "nothing was changed" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(desk.folder.glob("letter-*")) == []


@pytest.mark.req("CC-082")
def test_what_cannot_be_edited_says_why_in_one_line(desk: Desk) -> None:
    desk.letters.bury(burial("junk", body=b"\x00\xff"))
    for arguments, editor, says in (
        (("1", *CAUSE), "/no/such/editor", "cannot be started"),
        (("1", *CAUSE), "", "there is no terminal for an editor; use --file"),
        (("1", *CAUSE, "--file", "/no/such/file"), "", "cannot be read"),
        (("99", *CAUSE), "", "there is no dead letter 99"),
        (("2", *CAUSE), "", "give the whole body as a file"),
        (("1", *CAUSE[2:], "--cause", " "), "", "an edit needs a cause"),
    ):
        result = desk.run("dlq", "edit", *arguments, editor=editor)
        assert result.exit_code in (1, 2)
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert desk.run("dlq", "edit", "1", *CAUSE[2:]).exit_code == 2, "a cause is required"
    desk.letters.discard(Filter(ids=(1,)), reason="x", operator="ann")
    assert "is discarded" in desk.run("dlq", "edit", "1", *CAUSE, "--file", "-", given="{}").stderr


@pytest.mark.req("CC-081")
def test_poison_is_tried_and_redriven_with_its_option(desk: Desk) -> None:
    desk.letters.bury(burial_of(order("killer"), consumer="billing", error="x", category=Category.POISON))
    which = ("dlq", "redrive", "--consumer", "billing", "--category", "poison", "--yes")
    cause = ("--cause-category", "poison", "--root-cause", "a loop", "--fix-ref", "v2")
    refused = desk.run(*which, *cause)
    assert (refused.exit_code, "--poison-fixed" in refused.stderr) == (1, True)
    tried = desk.run(*which, "--poison-fixed", "--dry-run", "--task", f"{SHOP}:Bill")
    assert (tried.exit_code, "would succeed" in tried.stdout) == (0, True)
    assert desk.run(*which, "--poison-fixed").exit_code == 1, "it needs a cause, too"
    made = desk.run(*which, *cause, "--poison-fixed")
    assert (made.exit_code, "1 letter at" in made.stdout) == (0, True)


@pytest.mark.req("CC-082")
def test_an_edited_payload_may_kill_the_process_that_tries_it(desk: Desk) -> None:
    editor = desk.editor("path.write_text(json.dumps({'amount': 13}))")
    task = ("--task", f"{SHOP}:Kills")
    refused = desk.run("dlq", "edit", "1", "--cause", "x", *task, editor=editor)
    assert (refused.exit_code, "was killed by SIGKILL" in refused.stderr) == (1, True)
    assert "Your text is in" in refused.stderr
    (kept,) = desk.folder.glob("letter-1-*.json")
    assert json.loads(kept.read_text()) == {"amount": 13}


@pytest.mark.req("CC-081", "CC-082")
def test_a_dry_run_of_poison_survives_its_handler(desk: Desk) -> None:
    killer = burial_of(
        order("killer", {"amount": 13}), consumer="billing", error="x", category=Category.POISON
    )
    desk.letters.bury(killer)
    task = ("--task", f"{SHOP}:Kills")
    tried = desk.run(
        "dlq",
        "redrive",
        "--consumer",
        "billing",
        "--category",
        "poison",
        "--poison-fixed",
        "--dry-run",
        *task,
    )
    assert (tried.exit_code, "would die again: raises" in tried.stdout) == (1, True)
    assert "the process that tried it was killed by SIGKILL" in tried.stdout
    edit = ("dlq", "edit", "2", "--cause", "x", "--file", "-", *task)
    refused = desk.run(*edit, given='{"amount": 13, "more": 1}')
    assert (refused.exit_code, "was killed by SIGKILL" in refused.stderr) == (1, True)
    edited = desk.run(*edit, given='{"amount": 12}')
    assert (edited.exit_code, "it would succeed" in edited.stdout) == (0, True)


@pytest.mark.req("CC-083")
def test_letters_are_listed_in_groups(desk: Desk) -> None:
    desk.letters.bury(
        *(burial_of(order(f"p{n}"), consumer="billing", error=ValueError(f"no {n}")) for n in range(3))
    )
    desk.letters.bury(burial("sent", consumer="shipping", error="KeyError: 'street'"))
    first, second = json.loads(desk.run("dlq", "list", "--group", "--json").stdout)
    assert (first["letters"], first["error_class"], first["message"]) == (4, "ValueError", "no <number>")
    assert (second["consumer"], second["example"]) == ("shipping", 5)
    table = desk.run("dlq", "list", "--group", "--consumer", "billing").stdout
    assert "ValueError: no <number>" in table
    assert "shipping" not in table
    assert "1 more group" in desk.run("dlq", "list", "--group", "--limit", "1").stdout
    assert desk.run("dlq", "list", "--group", "--consumer", "nobody").stdout == "No dead letter matches.\n"
