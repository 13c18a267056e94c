"""`onceward boundary append|fetch|confirm|tail|put|get|consumers|stats` on a real boundary: for people, for machines,
and errors."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onceward.boundary import BoundaryClient, message_id_for
from onceward.cli.boundary.append import parse_line
from onceward.cli.main import app
from tests.support.boundary.server import boundary_server
from tests.support.wait import until

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}
DEADLINE = 60.0
ZONES = ("--from-zone", "plant-a", "--to-zone", "hq")
FACT = ("--subject", "batch:B1042", "--predicate", "completed", *ZONES)
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def url(data: Path) -> Iterator[str]:
    with boundary_server(data) as url:
        yield url


def run(*arguments: str, url: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(
        app, ["boundary", *arguments], input=stdin, env=WIDE | {"ONCEWARD_BOUNDARY_URL": url} | (env or {})
    )


def said(*arguments: str, url: str, stdin: str | None = None) -> str:
    result = run(*arguments, url=url, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*arguments: str, url: str, stdin: str | None = None) -> Any:
    return json.loads(said(*arguments, "--json", url=url, stdin=stdin))


def lines_of(*arguments: str, url: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said(*arguments, "--json", url=url).splitlines()]


def fails(*arguments: str, url: str, code: int, stdin: str | None = None) -> str:
    """The one line that gives the reason, the same for people and machines."""
    result = run(*arguments, url=url, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    again = run(*arguments, "--json", url=url, stdin=stdin)
    assert again.exit_code == code
    assert json.loads(again.stdout)["error"] in result.stderr
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def line(number: int, subject: str = "batch:B1", **more: Any) -> str:
    envelope = {"message_id": f"m{number}", "from_zone": "plant-a", "to_zone": "hq", **more}
    return json.dumps(
        {"envelope": envelope, "fact": {"subject": subject, "predicate": "counted", "object": number}}
    )


def append_some(url: str, number: int) -> None:
    said("append", "--lines", "-", url=url, stdin="\n".join(line(each) for each in range(1, number + 1)))


def started(*arguments: str, url: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "onceward", "boundary", *arguments],
        env=os.environ | {"ONCEWARD_BOUNDARY_URL": url},
        text=True,
        **more,
    )


# ── append ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fact_is_appended_once_however_often_it_is_said(url: str) -> None:
    first = ("append", *FACT, "--object", '{"litres": 480, "ok": true}', "--message-id", "m1")
    again = ("append", *FACT, "--object", '{ "ok":true,"litres":480 }', "--message-id", "m1")
    assert said(*first, url=url) == "Appended at offset 1.\n"
    assert said(*again, url=url) == "Already there, at offset 1.\n"
    assert answer(*again, url=url) == {"offset": 1, "duplicate": True, "message_id": "m1"}
    reported = fails("append", *FACT, "--object", "{}", "--message-id", "m1", url=url, code=1)
    assert "message_id 'm1' already exists at offset 1 with different content" in reported


def test_an_id_is_made_of_its_parts_as_programs_make_it(url: str) -> None:
    parts = ("--id-part", "batch", "--id-part", "B1042")
    found = answer("append", *FACT, *parts, "--object", "1", url=url)
    assert found["message_id"] == message_id_for("batch", "B1042")


def test_an_object_comes_from_a_file_or_from_standard_input(url: str, tmp_path: Path) -> None:
    (tmp_path / "object.json").write_text('{\n  "name": "Zürich"\n}\n')
    said("append", *FACT, "--message-id", "m1", "--object", f"@{tmp_path / 'object.json'}", url=url)
    said("append", *FACT, "--message-id", "m2", "--object", "-", url=url, stdin="[1,\n2]")
    first, second = lines_of("fetch", "--consumer", "c", url=url)
    assert first["fact"]["object"] == {"name": "Zürich"}
    assert second["fact"]["object"] == [1, 2]


def test_labels_and_lineage_travel_in_the_envelope(url: str) -> None:
    more = ("--label", "site=a", "--label", "note=x=y", "--correlation-id", "order-7", "--causation-id", "m0")
    said("append", *FACT, "--message-id", "m1", "--object", "1", *more, url=url)
    (found,) = lines_of("fetch", "--consumer", "c", url=url)
    assert found["envelope"]["labels"] == {"site": "a", "note": "x=y"}
    assert (found["envelope"]["correlation_id"], found["envelope"]["causation_id"]) == ("order-7", "m0")
    assert (found["envelope"]["from_zone"], found["envelope"]["to_zone"]) == ("plant-a", "hq")


def test_help_says_which_options_are_needed() -> None:
    shown = run("append", "--help", url=NOWHERE, env={"COLUMNS": "120"}).stdout
    panels = re.split(r"╭─ ", shown)
    (fact,) = [each for each in panels if each.startswith("One fact (all required)")]
    for option in ("--subject", "--predicate", "--object", "--from-zone", "--to-zone"):
        assert option in fact
    (names,) = [each for each in panels if each.startswith("Message id (one required)")]
    assert "--message-id" in names
    assert "--id-part" in names
    (many,) = [each for each in panels if each.startswith("Or many facts")]
    assert "--lines" in many


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (FACT, "missing --object"),
        (("--object", "1"), "missing --subject, --predicate, --from-zone, --to-zone"),
        ((*FACT, "--object", "1"), "--message-id"),
        ((*FACT, "--object", "1", "--message-id", "m", "--id-part", "x"), "either --message-id"),
        ((*FACT, "--object", "1", "--id-part", ""), "--id-part"),
        ((*FACT, "--object", "1", "--message-id", "m", "--label", "site"), "--label must be NAME=VALUE"),
        ((*FACT, "--object", "@/no/such/file", "--message-id", "m"), "@/no/such/file cannot be read"),
        (("--lines", "-", "--subject", "batch:B1"), "remove --subject"),
        (("--lines", "-", "--correlation-id", "x"), "remove --correlation-id"),
        (("--lines", "/no/such/file"), "/no/such/file cannot be read"),
    ],
)
def test_wrong_arguments_are_named_and_end_with_2(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails("append", *arguments, url=NOWHERE, code=2)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (("--subject", "B1042"), "fact.subject"),
        (("--predicate", "Completed"), "fact.predicate"),
        (("--object", "{"), "fact.object_json"),
        (("--from-zone", "a\tb"), "envelope.from_zone"),
    ],
)
def test_what_the_boundary_refuses_is_reported_with_the_field(
    url: str, changed: tuple[str, ...], field: str
) -> None:
    given = ("append", *FACT, "--object", "1", "--message-id", "m1", *changed)
    assert field in fails(*given, url=url, code=1)
    assert answer("stats", url=url)["last"] == 0


# ── many lines ──────────────────────────────────────────────────────────────────────────────────────────


def test_many_lines_are_appended_once_each_and_in_order_for_each_subject(url: str, tmp_path: Path) -> None:
    subjects = [f"batch:B{number % 7}" for number in range(300)]
    text = "\n\n".join(line(number, subject) for number, subject in enumerate(subjects, 1))
    (tmp_path / "facts.jsonl").write_text(text)
    given = ("append", "--lines", str(tmp_path / "facts.jsonl"))
    assert answer(*given, url=url) == {"appended": 300, "duplicates": 0, "last_offset": 300}
    assert said(*given, url=url) == "0 appended, 300 already there; the last offset is 300.\n"
    found = lines_of("fetch", "--consumer", "c", "--limit", "1000", url=url)
    for subject in set(subjects):
        numbers = [each["fact"]["object"] for each in found if each["fact"]["subject"] == subject]
        assert numbers == [number for number, each in enumerate(subjects, 1) if each == subject]


def test_what_fetch_writes_append_reads(url: str, tmp_path: Path) -> None:
    body = '{"big": 9007199254740991, "text": "a\\nb", "nested": [{}, 1.50]}'
    said("append", *FACT, "--message-id", "m1", "--object", body, "--label", "site=a", url=url)
    lines = said("fetch", "--consumer", "c", "--json", url=url)
    with boundary_server(tmp_path / "other") as other:
        assert answer("append", "--lines", "-", url=other, stdin=lines)["appended"] == 1
        assert _without_times(lines_of("fetch", "--consumer", "c", url=other)) == _without_times(
            [json.loads(lines)]
        )
    assert answer("append", "--lines", "-", url=url, stdin=lines)["duplicates"] == 1


def _without_times(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: each[name] for name in each if name != "appended_at_unix_ms"} for each in facts]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("[]", "Expected `object`"),
        ('{"fact": {}, "envelope": {}}', "missing required field `subject`"),
        (line(3, from_zone=7), "envelope: Expected `str`, got `int` - at `$.from_zone`"),
        (line(3, corelation_id="x"), "an envelope has no 'corelation_id'"),
        (line(3).replace('"object"', '"objekt"'), "unknown field `objekt`"),
        (line(3).replace(', "object": 3', ""), "a fact needs either object, or object_json"),
        (
            line(3).replace('"object"', '"object_json": "3", "object"'),
            "a fact needs either object, or object_json",
        ),
    ],
)
def test_a_line_of_another_form_is_refused(bad: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_line(bad.encode())


def test_an_object_may_be_in_a_line_as_a_text() -> None:
    envelope, fact = parse_line(line(3).replace('"object": 3', '"object_json": "[3, 4]"').encode())
    assert fact.object == [3, 4]
    assert envelope.produced_at_unix_ms > 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "truncated"),
        (line(3, subject="B1"), "fact.subject"),
        (line(1).replace(": 1}", ": 2}"), "message_id 'm1' already exists"),
    ],
)
def test_a_bad_line_is_named_what_is_before_it_is_appended_and_all_can_be_repeated(
    url: str, bad: str, message: str
) -> None:
    lines = f"{line(1)}\n{line(2)}\n{bad}\n"
    result = run("append", "--lines", "-", url=url, stdin=lines)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("line 3: ")
    assert message in result.stderr
    assert "(2 appended, 0 already there; it is safe to repeat all lines)" in result.stderr
    again = fails("append", "--lines", "-", url=url, code=1, stdin=lines)
    assert "(0 appended, 2 already there;" in again
    repeated = answer("append", "--lines", "-", url=url, stdin=f"{line(1)}\n{line(2)}\n{line(9)}\n")
    assert repeated == {"appended": 1, "duplicates": 2, "last_offset": 3}


def test_no_lines_are_no_error(url: str) -> None:
    assert said("append", "--lines", "-", url=url, stdin="\n") == "No lines.\n"


# ── fetch, confirm, tail ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("BC-01")
def test_a_fetch_shows_the_next_facts_and_the_same_again_until_they_are_confirmed(url: str) -> None:
    append_some(url, 5)
    for _ in range(2):
        found = lines_of("fetch", "--consumer", "hq", "--limit", "3", url=url)
        assert [each["offset"] for each in found] == [1, 2, 3]
    shown = said("fetch", "--consumer", "hq", url=url)
    assert len(shown.splitlines()) == 2 * 5
    for word in ("batch:B1 counted  5", "plant-a → hq  m5"):
        assert word in shown
    assert said("confirm", "--consumer", "hq", "--offset", "3", url=url) == "The cursor of hq is at 3.\n"
    assert [each["offset"] for each in lines_of("fetch", "--consumer", "hq", url=url)] == [4, 5]
    assert answer("confirm", "--consumer", "hq", "--offset", "1", url=url) == {"cursor_advanced_to": 3}
    assert "last fact is 5" in fails("confirm", "--consumer", "hq", "--offset", "6", url=url, code=1)
    assert "it has never fetched" in fails("confirm", "--consumer", "x", "--offset", "1", url=url, code=1)


def test_facts_can_be_read_in_a_terminal_of_100_columns(url: str) -> None:
    body = json.dumps({"text": "x" * 300})
    said("append", *FACT, "--id-part", "batch", "--object", body, url=url)
    shown = run("fetch", "--consumer", "hq", url=url, env={"COLUMNS": "100"}).stdout
    first, second = shown.splitlines()
    assert max(len(first), len(second)) <= 100
    assert "batch:B1042 completed  {" in first
    assert second.strip() == f"plant-a → hq  {message_id_for('batch')}"


def test_a_fetch_confirms_what_it_has_printed_if_it_is_reported_to(url: str) -> None:
    append_some(url, 3)
    given = ("fetch", "--consumer", "hq", "--limit", "2", "--confirm")
    assert [each["offset"] for each in lines_of(*given, url=url)] == [1, 2]
    assert [each["offset"] for each in lines_of(*given, url=url)] == [3]
    assert lines_of(*given, url=url) == []
    assert said(*given, url=url) == "Nothing new for hq.\n"


def test_what_nobody_read_is_not_confirmed(url: str) -> None:
    append_some(url, 3)
    reading, writing = os.pipe()
    os.close(reading)
    process = started("tail", "--consumer", "hq", "--once", url=url, stdout=writing)
    os.close(writing)
    assert process.wait(DEADLINE) == 1
    assert answer("consumers", url=url)[0]["offset"] == 0


def test_a_gap_is_reported_to_people_and_to_machines(data: Path) -> None:
    with boundary_server(data) as url:
        run("fetch", "--consumer", "hq", url=url)
        append_some(url, 5)
    with closing(sqlite3.connect(data / "boundary.db")) as database, database:
        database.execute('DELETE FROM facts WHERE "offset" <= 3')  # they have expired
    with boundary_server(data) as url:
        gap, first, _ = lines_of("fetch", "--consumer", "hq", url=url)
        assert gap == {"gap": {"first_missing": 1, "last_missing": 3}}
        assert first["offset"] == 4
        for command in (("fetch", "--consumer", "hq"), ("tail", "--consumer", "hq", "--once")):
            reported = run(*command, url=url).stderr
            assert reported == "GAP: facts 1 to 3 expired before hq confirmed them; it will not get them\n"
        assert run("fetch", "--consumer", "hq", url=url).stderr == ""


def test_a_tail_to_the_end_prints_and_confirms_page_after_page(url: str) -> None:
    append_some(url, 250)
    found = lines_of("tail", "--consumer", "watcher", "--once", url=url)
    assert [each["offset"] for each in found] == list(range(1, 251))
    assert said("tail", "--consumer", "watcher", "--once", url=url) == ""
    (shown, *_) = said("tail", "--consumer", "other", "--once", url=url).splitlines()
    assert shown.split()[0] == "1"
    assert shown.endswith("batch:B1 counted  1")


def test_a_tail_follows_until_ctrl_c(url: str) -> None:
    append_some(url, 1)
    process = started("tail", "--consumer", "watcher", "--json", url=url, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["offset"] == 1
    append_some(url, 2)
    assert json.loads(process.stdout.readline())["offset"] == 2
    until(lambda: answer("consumers", url=url)[0]["offset"] == 2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=DEADLINE) == ("", None)
    assert process.returncode == 130


# ── objects ─────────────────────────────────────────────────────────────────────────────────────────────


BLOB = os.urandom(700_001)
DIGEST = f"sha256:{hashlib.sha256(BLOB).hexdigest()}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "report.pdf"
    path.write_bytes(BLOB)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    path = tmp_path / "here"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def test_an_object_comes_back_as_it_was_put(url: str, file: Path, here: Path) -> None:
    reference = answer("put", "batch-files", "plant/B1.pdf", str(file), url=url)
    assert reference == {
        "bucket": "batch-files",
        "key": "plant/B1.pdf",
        "digest": DIGEST,
        "size": len(BLOB),
        "media_type": "application/pdf",
    }
    assert DIGEST in said(
        "put", "batch-files", "plant/B1.pdf", str(file), url=url
    )  # the same bytes again are fine
    assert said("get", "batch-files", "plant/B1.pdf", url=url) == (
        f"Wrote B1.pdf: 700,001 bytes, verified: {DIGEST}\n"
    )
    assert (here / "B1.pdf").read_bytes() == BLOB
    assert answer("get", "batch-files", "plant/B1.pdf", "copy.pdf", url=url) == reference
    assert run("get", "batch-files", "plant/B1.pdf", "-", url=url).stdout_bytes == BLOB
    assert sorted(each.name for each in here.iterdir()) == ["B1.pdf", "copy.pdf"]


def test_a_reference_is_what_a_fact_says_of_it(url: str, file: Path) -> None:
    reference = said("put", "batch-files", "B1", str(file), "--media-type", "x/y", "--json", url=url)
    said("append", *FACT, "--message-id", "m1", "--object", "-", url=url, stdin=reference)
    with BoundaryClient(url) as client:
        (stored,) = client.fetch("c").facts
        assert client.fetch_artifact(stored) == BLOB
        assert stored.fact.object["media_type"] == "x/y"


def test_an_object_comes_from_standard_input(url: str, here: Path) -> None:
    process = started("put", "batch-files", "k", "-", url=url, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    reported, _ = process.communicate("from a pipe", timeout=DEADLINE)
    assert reported.startswith("Stored batch-files/k: 11 bytes of application/octet-stream, sha256:")
    said("get", "batch-files", "k", url=url)
    assert (here / "k").read_bytes() == b"from a pipe"


def test_an_object_is_not_changed(url: str, file: Path, tmp_path: Path) -> None:
    said("put", "batch-files", "k", str(file), url=url)
    (tmp_path / "other").write_bytes(b"other")
    reported = fails("put", "batch-files", "k", str(tmp_path / "other"), url=url, code=1)
    assert "batch-files/k already exists with different bytes" in reported


def test_a_file_is_overwritten_only_if_that_is_said(url: str, file: Path, here: Path) -> None:
    said("put", "batch-files", "k", str(file), url=url)
    (here / "k").write_text("mine")
    assert "k already exists" in fails("get", "batch-files", "k", url=url, code=2)
    assert (here / "k").read_text() == "mine"
    said("get", "batch-files", "k", "--force", url=url)
    assert (here / "k").read_bytes() == BLOB


@pytest.mark.req("RN-11")
def test_a_planted_symlink_is_not_followed_and_what_is_written_is_private(
    url: str, file: Path, here: Path, data: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    said("put", "batch-files", "k", str(file), url=url)
    for name in ("k", "bundle"):
        (here / name).symlink_to(victim)
    export = ("export", "bundle", "--store", str(data), "--zone", "z", "--since", "0")
    assert "k already exists" in fails("get", "batch-files", "k", url=url, code=2)
    assert "bundle already exists" in fails(*export, url=url, code=2)
    said("get", "batch-files", "k", "--force", url=url)
    assert not (here / "k").is_symlink()
    assert stat.S_IMODE((here / "k").stat().st_mode) == 0o600
    assert not victim.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("get", "b", "k", "."), ". is a directory"),
        (("get", "b", "k/.."), ".. is a directory"),
        (("get", "b", "k", "/dev/null", "--force"), "/dev/null is not a regular file"),
        (("put", "b", "k", "/no/such/file"), "/no/such/file cannot be read"),
        (("put", "b", "k", "/dev"), "/dev cannot be read: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_used_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails(*arguments, url=NOWHERE, code=2)


def test_what_is_not_there_or_not_right_leaves_no_file(url: str, data: Path, file: Path, here: Path) -> None:
    assert "there is no object batch-files/k" in fails("get", "batch-files", "k", url=url, code=1)
    said("put", "batch-files", "k", str(file), url=url)
    content = data / "objects" / "content" / DIGEST[7:9] / DIGEST[7:]
    content.write_bytes(b"!" + BLOB[1:])
    (here / "k").write_text("mine")
    reported = fails("get", "batch-files", "k", "--force", url=url, code=1)
    assert f"arrived damaged: it does not have the digest {DIGEST}" in reported
    assert run("get", "batch-files", "k", "-", url=url).exit_code == 1
    assert [(each.name, each.read_text()) for each in here.iterdir()] == [("k", "mine")]


def test_ctrl_c_in_an_upload_keeps_nothing_of_it(url: str, data: Path) -> None:
    process = started("put", "batch-files", "k", "-", url=url, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write("half of it")
    process.stdin.flush()
    incoming = data / "objects" / "incoming"
    until(lambda: any(incoming.iterdir()))
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130  # while the pipe is open
    assert "interrupted; nothing is left half done" in process.communicate()[1]
    until(lambda: not any(incoming.iterdir()))
    assert "there is no object" in fails("get", "batch-files", "k", "-", url=url, code=1)


# ── progress bars ───────────────────────────────────────────────────────────────────────────────────────


def test_transfers_have_a_bar_on_a_terminal_and_only_there(url: str, file: Path, here: Path) -> None:
    (here / "facts.jsonl").write_text("\n".join(line(number) for number in range(20)))
    for arguments, shown in [
        (("put", "batch-files", "k1", str(file)), "batch-files/k1"),
        (("get", "batch-files", "k1"), "batch-files/k1"),
        (("append", "--lines", "facts.jsonl"), "appending"),
    ]:
        on_terminal = run(*arguments, url=url, env={"FORCE_COLOR": "1"})
        assert shown in on_terminal.stderr
        assert "━" in on_terminal.stderr
        assert "100%" in on_terminal.stderr  # of a known size
        assert "━" not in on_terminal.stdout
        (here / "k1").unlink(missing_ok=True)
        assert run(*arguments, url=url).stderr == ""


# ── consumers and stats ─────────────────────────────────────────────────────────────────────────────────


def test_consumers_and_stats_say_how_far_everybody_is(url: str) -> None:
    assert said("consumers", url=url) == "No consumer has fetched yet.\n"
    append_some(url, 200)
    for name in ("billing", "archive"):
        said("fetch", "--consumer", name, "--limit", "1", url=url)
    said("confirm", "--consumer", "billing", "--offset", "199", url=url)
    archive, billing = answer("consumers", url=url)
    assert archive == {"name": "archive", "offset": 0, "backlog": 200, "confirmed_at": None}
    assert (billing["offset"], billing["backlog"]) == (199, 1)
    assert billing["confirmed_at"].endswith("+00:00")
    shown = said("consumers", url=url)
    for word in ("billing", "199", "archive", "200"):
        assert word in shown
    stats = answer("stats", url=url)
    assert (stats["first"], stats["last"], len(stats["consumers"])) == (1, 200, 2)
    assert "archive, by 200 facts" in said("stats", url=url)
    refused = fails("stats", url=url.replace("://", "://ann:pw-9f@"), code=2)
    assert "has a user or password, which would not be sent" in refused
    assert "pw-9f" not in refused


@pytest.mark.req("BC-38")
def test_a_consumer_can_be_removed(url: str) -> None:
    append_some(url, 2)
    for name in ("old", "new"):
        said("fetch", "--consumer", name, "--confirm", url=url)
    assert said("consumers", "remove", "old", url=url) == "Removed old, which had confirmed up to offset 2.\n"
    assert [each["name"] for each in answer("consumers", url=url)] == ["new"]
    assert fails("consumers", "remove", "old", url=url, code=1) == "there is no consumer 'old'\n"
    assert answer("consumers", "remove", "new", url=url) == {"name": "new", "offset": 2}


def test_options_before_remove_would_be_ignored_so_they_are_refused(url: str) -> None:
    said("fetch", "--consumer", "old", url=url)
    result = run("consumers", "--url", NOWHERE, "remove", "old", url=url)
    assert (result.exit_code, result.stderr) == (2, "put --url and --json after `remove`\n")
    assert len(answer("consumers", url=url)) == 1


@pytest.mark.req("BC-41")
@pytest.mark.parametrize("command", ["stats", "consumers"])
def test_a_store_that_is_away_is_named(command: str, url: str, data: Path) -> None:
    with closing(sqlite3.connect(data / "boundary.db")) as database:
        database.execute("DROP TABLE cursors")
    assert "answers 503: the store cannot be read: the log cannot be read: no such table" in fails(
        command, url=url, code=1
    )


# ── no server ───────────────────────────────────────────────────────────────────────────────────────────


COMMANDS = [
    ("append", *FACT, "--object", "1", "--message-id", "m1"),
    ("append", "--lines", "-"),
    ("fetch", "--consumer", "c"),
    ("confirm", "--consumer", "c", "--offset", "1"),
    ("tail", "--consumer", "c"),
    ("put", "b", "k", __file__),
    ("get", "b", "k", "no-such-file"),
    ("consumers",),
    ("consumers", "remove", "c"),
    ("stats",),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: "-".join(arguments[:2]))
def test_a_boundary_that_does_not_answer_is_named_with_what_to_do(arguments: tuple[str, ...]) -> None:
    reported = fails(*arguments, url=NOWHERE, code=1, stdin=line(1))
    assert f"the boundary at {NOWHERE} cannot be reached: " in reported
    assert "Connection refused" in reported
    assert "check that it is running (`onceward boundary serve`), or correct its URL" in reported
    assert not Path("no-such-file").exists()


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: "-".join(arguments[:2]))
def test_what_is_no_url_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert "not '127.0.0.1:7700'" in fails(*arguments, url="127.0.0.1:7700", code=2, stdin=line(1))


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: "-".join(arguments[:2]))
def test_what_is_no_boundary_is_an_error_in_one_line(arguments: tuple[str, ...], elsewhere: str) -> None:
    assert elsewhere in fails(*arguments, url=elsewhere, code=1, stdin=line(1))


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """A web server that is not a boundary."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_error_of_a_command_before_it_in_a_pipe_does_not_become_a_fact(url: str, tmp_path: Path) -> None:
    onceward = f"{sys.executable} -m onceward boundary"
    about = "--subject a:b --predicate filed --from-zone a --to-zone b --message-id m1"
    pipe = f"{onceward} put b k {tmp_path}/nofile --json --url {url} | {onceward} append --object - {about} --url {url}"
    ended = subprocess.run(["sh", "-c", pipe], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "nothing is appended" in ended.stderr
    with BoundaryClient(url) as client:
        assert client.fetch("c").facts == ()
