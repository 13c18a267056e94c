"""`onceward inbox` and `onceward consumers` on real databases: for people, for machines, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from typer.testing import CliRunner, Result

from onceward.cli.inbox import EFFECT_COLUMNS, effect_cells
from onceward.cli.main import app
from onceward.cli.output import print_table
from onceward.inbox import Contract, Event, Inbox
from onceward.inbox.stores import partitions
from tests.support.schema import new_schema
from tests.verification.proofs import proof, with_results

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}
OLD = 200
CLOSED = ("--reason", "case closed", "--operator", "bob")


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        path = tmp_path / "inbox.db"
        path.touch()
        yield f"sqlite:///{path}"
        return
    with new_schema(request.getfixturevalue("postgres_url")) as schema:
        yield schema.plain_url


@pytest.fixture
def url(empty: str) -> str:
    """With two consumers, one of which has an old event, a recent one, and an effect in doubt."""
    engine = create_engine(driven(empty))
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(contract("billing", mode="effectful"))
    inbox.register(contract("archive", retention="legal-hold"))
    for tracking_id, days_ago in [("old", OLD), ("new", 1)]:
        inbox.process(contract("billing", mode="effectful"), event(tracking_id, days_ago), charge)
    inbox.process(contract("archive", retention="legal-hold"), event("old", OLD), lambda event, session: None)
    with pytest.raises(TimeoutError):
        inbox.process(contract("billing", mode="effectful"), event("lost", 1), time_out)
    make_old(engine)
    engine.dispose()
    return empty


def make_old(engine: Engine) -> None:
    """As if the old events had been done when they were made."""
    at = time.time() - OLD * 86_400
    with engine.begin() as connection:
        run = connection.exec_driver_sql
        if engine.dialect.name == "sqlite":
            run(
                f"UPDATE onceward_dedup SET keep_day = own_day, processed_at = {at} WHERE tracking_id = 'old'"
            )
        else:
            run(f"UPDATE onceward_dedup SET processed_at = to_timestamp({at}) WHERE tracking_id = 'old'")
        run(f"UPDATE onceward_effects SET settled_at = {at} WHERE tracking_id = 'old'")


def driven(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


def charge(event: Event, session: Any) -> None:
    session.effect("charge-card", lambda key: "ok")


def time_out(event: Event, session: Any) -> None:
    def call(key: str) -> None:
        raise TimeoutError("no answer")

    session.effect("charge-card", call)


def contract(consumer_id: str, **changes: Any) -> Contract:
    return Contract(
        consumer_id=consumer_id,
        event_types=["*"],
        owner_team="money",
        idempotency_mechanism="dedup record and invoice in one transaction",
        **changes,
    )


def event(tracking_id: str, days_ago: int) -> Event:
    created_at = datetime.now(UTC) - timedelta(days=days_ago)
    return Event(tracking_id=tracking_id, event_type="paid", created_at=created_at, payload={})


def run(*arguments: str, url: str | None = None) -> Result:
    where = [] if url is None else ["--database", url]
    return CliRunner().invoke(app, [*arguments, *where], env=WIDE)


def answer(*arguments: str, url: str) -> Any:
    result = run(*arguments, "--json", url=url)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def is_time(value: str) -> bool:
    return datetime.fromisoformat(value).tzinfo is not None


# ── the registry ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-040")
def test_consumers_are_listed(url: str) -> None:
    archive, billing = answer("consumers", "list", url=url)
    assert (archive["consumer_id"], archive["kept_days"]) == ("archive", None)
    assert (billing["consumer_id"], billing["kept_days"]) == ("billing", 90)
    assert billing["contract"]["owner_team"] == "money"
    assert billing["contract"]["event_types"] == ["*"]
    assert billing["contract"]["idempotency_mechanism"] == "dedup record and invoice in one transaction"
    assert is_time(billing["registered_at"])
    assert is_time(billing["updated_at"])
    shown = run("consumers", "list", url=url)
    assert shown.exit_code == 0
    for word in ("billing", "money", "90 days", "archive", "until released", "effectful"):
        assert word in shown.stdout


@pytest.mark.req("CC-040")
def test_one_consumer_is_shown_with_its_whole_contract(url: str) -> None:
    billing = answer("consumers", "show", "billing", url=url)
    assert billing["contract"] == json.loads(json.dumps(contract("billing", mode="effectful").as_row()))
    shown = run("consumers", "show", "billing", url=url)
    for name in contract("billing").as_row():
        assert name in shown.stdout
    assert billing["evidence"] is None
    assert "none in this database" in shown.stdout


@pytest.mark.req("CC-068")
def test_one_consumer_is_shown_with_its_newest_evidence(url: str) -> None:
    engine = create_engine(driven(url))
    inbox = Inbox(engine)
    inbox.record_evidence(proof())
    inbox.record_evidence(proof(tested=with_results(kills="skipped")))
    engine.dispose()
    evidence = answer("consumers", "show", "billing", url=url)["evidence"]
    assert (evidence["result"], evidence["backend"]) == ("partial", "sqlite")
    assert is_time(evidence["recorded_at"])
    assert (
        f"partial on sqlite, code {evidence['code'][:12]}"
        in run("consumers", "show", "billing", url=url).stdout
    )


def test_an_unknown_consumer_is_named_beside_those_there_are(url: str) -> None:
    for arguments in [
        ("consumers", "show", "typo"),
        ("inbox", "purge", "--consumer", "typo"),
        ("inbox", "hold", "typo", "--reason", "case 7"),
    ]:
        result = run(*arguments, url=url)
        assert result.exit_code == 2
        assert "consumer 'typo' is not registered" in result.stderr
        assert "archive, billing" in result.stderr
        assert result.stdout == ""
        failed = run(*arguments, "--json", url=url)
        assert failed.exit_code == 2
        assert "'typo' is not registered" in json.loads(failed.stdout)["error"]


# ── the tables ──────────────────────────────────────────────────────────────────────────────────────────


def test_migrate_makes_the_tables_once(empty: str) -> None:
    first = answer("inbox", "migrate", url=empty)
    assert "0001 inbox" in first["applied"]
    assert answer("inbox", "migrate", url=empty) == {"applied": []}
    assert "Already up to date" in run("inbox", "migrate", url=empty).stdout
    assert answer("inbox", "stats", url=empty) == []
    assert "No consumer is registered" in run("inbox", "stats", url=empty).stdout


@pytest.mark.req("CC-054")
def test_migrate_goes_back_and_forth_without_losing_a_record(url: str) -> None:
    before = answer("inbox", "stats", url=url)
    assert answer("inbox", "migrate", "--back-to", "4", url=url)["reverted"][-1] == "0005 identity"
    assert "Nothing to revert" in run("inbox", "migrate", "--back-to", "4", url=url).stdout
    behind = run("inbox", "stats", url=url)
    assert (behind.exit_code, "migration 5" in behind.stderr) == (2, True)
    too_far = run("inbox", "migrate", "--back-to", "3", url=url)
    assert (too_far.exit_code, "would delete records" in too_far.stderr) == (2, True)
    assert "applied 0005 identity" in run("inbox", "migrate", url=url).stdout
    assert answer("inbox", "stats", url=url) == before


@pytest.mark.req("CC-089")
def test_a_hold_says_if_there_is_nothing_to_protect(url: str) -> None:
    assert not answer("inbox", "hold", "billing", "typo", "--reason", "case 7", url=url)["known"]
    assert answer("inbox", "hold", "archive", "old", "--reason", "case 7", url=url)["known"]
    shown = run("inbox", "hold", "billing", "typo", "--reason", "case 7", url=url).output
    assert "The inbox has no record of this event: check the id" in " ".join(shown.split())


@pytest.mark.req("CC-055")
def test_a_hold_takes_any_spelling_of_a_uuid(url: str) -> None:
    spelled = "8B1C2E760F7E4F0E9A5D3F6A1C2B4D5E"
    assert answer("inbox", "hold", "billing", spelled, "--reason", "case 7", url=url)["placed"]
    [row] = answer("inbox", "holds", url=url)
    assert row["tracking_id"] == "8b1c2e76-0f7e-4f0e-9a5d-3f6a1c2b4d5e"
    spelled = f"{{{row['tracking_id'].upper()}}}"
    assert answer("inbox", "release", "billing", spelled, "--reason", "closed", url=url)["released"]


def test_migrate_prints_the_sql_and_changes_nothing(empty: str) -> None:
    printed = run("inbox", "migrate", "--print", url=empty)
    assert printed.exit_code == 0
    assert "CREATE TABLE onceward_dedup" in printed.stdout
    assert ("PARTITION BY RANGE" in printed.stdout) == empty.startswith("postgresql")
    assert answer("inbox", "migrate", "--print", url=empty)["sql"] in printed.stdout
    assert run("inbox", "stats", url=empty).exit_code == 2, "there are still no tables"


@pytest.mark.parametrize(
    "arguments",
    [
        ("inbox", "stats"),
        ("inbox", "purge"),
        ("inbox", "hold", "billing", "--reason", "case 7"),
        ("inbox", "release", "billing", "--reason", "case 7"),
        ("inbox", "holds"),
        ("inbox", "effects"),
        ("consumers", "list"),
        ("consumers", "show", "billing"),
    ],
)
def test_without_tables_every_command_says_how_to_make_them(empty: str, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, url=empty)
    assert result.exit_code == 2
    assert "onceward inbox migrate" in result.stderr
    assert len(result.stderr.splitlines()) == 1


# ── contents ────────────────────────────────────────────────────────────────────────────────────────────


def test_stats_count_what_there_is(url: str) -> None:
    archive, billing = answer("inbox", "stats", url=url)
    assert list(billing) == [
        "consumer_id",
        "registered",
        "dedup_rows",
        "oldest_day",
        "horizon",
        "unended",
        "effects_in_doubt",
        "parked",
        "holds",
    ]
    assert (archive["dedup_rows"], billing["dedup_rows"]) == (1, 2)
    assert billing["effects_in_doubt"] == 1
    assert billing["horizon"] is None
    assert date.fromisoformat(billing["oldest_day"]) < date.today() - timedelta(days=OLD - 2)
    assert "dedup rows" in run("inbox", "stats", url=url).stdout


def test_effects_in_doubt_are_listed_with_their_keys(url: str) -> None:
    [lost] = answer("inbox", "effects", url=url)
    assert (lost["tracking_id"], lost["name"], lost["state"]) == ("lost", "charge-card", "intended")
    assert "no answer" in lost["error"]
    assert is_time(lost["intended_at"])
    assert lost["settled_at"] is None
    assert len(answer("inbox", "effects", "--all", url=url)) == 3
    assert len(answer("inbox", "effects", "--all", "--limit", "2", url=url)) == 2
    table = run("inbox", "effects", url=url).stdout
    assert lost["effect_key"] in table
    assert "in doubt" in table


@pytest.mark.req("CC-057", "CC-058")
@pytest.mark.parametrize(("says", "state"), [("--happened", "done"), ("--did-not-happen", "refused")])
def test_an_operator_records_what_the_provider_says(url: str, says: str, state: str) -> None:
    effect = ("inbox", "resolve", "billing", "lost", "charge-card")
    result = ("--result", '{"receipt": 7}') if says == "--happened" else ()
    by = (says, *result, "--reason", "asked Stripe", "--operator", "anna")
    assert answer(*effect, *by, url=url)["state"] == state
    assert answer("inbox", "effects", "--in-doubt", url=url) == []
    found = {row["tracking_id"]: row["state"] for row in answer("inbox", "effects", "--all", url=url)}
    assert found["lost"] == state
    [noted] = [row for row in answer("audit", "list", url=url) if row["action"] == "resolve_effect"]
    assert noted["operator"] == "anna"
    assert "asked Stripe" in str(noted["details"])
    again = run(*effect, says, "--reason", "x", url=url)
    assert (again.exit_code, f"it is {state}" in again.stderr) == (2, True)


@pytest.mark.req("CC-057")
def test_a_resolution_without_an_answer_or_with_a_wrong_one_is_refused(url: str) -> None:
    effect = ("inbox", "resolve", "billing", "lost", "charge-card")
    assert run(*effect, "--reason", "x", url=url).exit_code == 2
    for wrong, says in (
        (("--reason", "x"), "Add --happened or --did-not-happen"),
        (("--happened", "--reason", "x", "--result", "{"), "not JSON"),
        (("--did-not-happen", "--reason", "x", "--result", "1"), "remove --result"),
        (("--happened", "--reason", " "), "give a reason"),
    ):
        refused = run(*effect, *wrong, url=url)
        assert (refused.exit_code, says in refused.stderr) == (2, True), refused.stderr
    unknown = run("inbox", "resolve", "billing", "lost", "ship", "--happened", "--reason", "x", url=url)
    assert (unknown.exit_code, "no such effect" in unknown.stderr) == (2, True)
    assert len(answer("inbox", "effects", url=url)) == 1


def test_a_purge_reports_what_went_and_what_stayed(url: str) -> None:
    report = answer("inbox", "purge", url=url)
    assert (report["rows"], report["effects"], report["unfinished"]) == (1, 1, [])
    assert list(report["floors"]) == ["billing"]
    assert date.fromisoformat(report["floors"]["billing"]) < date.today() - timedelta(days=88)
    assert "legal-hold" in report["skipped"]["archive"]
    again = run("inbox", "purge", "--consumer", "billing", url=url)
    assert again.exit_code == 0
    assert "Deleted 0 dedup rows" in again.stdout
    assert report["floors"]["billing"] in again.stdout
    [lost] = answer("inbox", "effects", url=url)
    assert lost["tracking_id"] == "lost"


def test_a_hold_is_placed_listed_kept_and_released(url: str) -> None:
    placed = answer("inbox", "hold", "billing", "old", "--reason", "case 7", "--operator", "anna", url=url)
    assert placed == {"consumer_id": "billing", "tracking_id": "old", "placed": True, "known": True}
    again = " ".join(run("inbox", "hold", "billing", "old", "--reason", "x", url=url).stdout.split())
    assert "was on hold already, by anna since " in again
    assert again.endswith(": case 7. The new reason was not stored.")
    assert (
        "Everything of billing is on hold" in run("inbox", "hold", "billing", "--reason", "x", url=url).stdout
    )
    wide, single = answer("inbox", "holds", url=url)
    assert wide["tracking_id"] is None
    assert wide["operator"], "the user's name"
    assert is_time(single.pop("placed_at"))
    assert single == {"consumer_id": "billing", "tracking_id": "old", "reason": "case 7", "operator": "anna"}
    assert "everything" in run("inbox", "holds", url=url).stdout
    assert answer("inbox", "purge", url=url)["skipped"]["billing"] == "it is on hold"
    assert answer("inbox", "release", "billing", *CLOSED, url=url)["released"] is True
    assert answer("inbox", "purge", url=url)["rows"] == 0, "the single hold stays"
    assert answer("inbox", "release", "billing", "old", *CLOSED, url=url)["released"] is True
    assert answer("inbox", "purge", url=url)["rows"] == 1
    assert "Nothing is on hold" in run("inbox", "holds", url=url).stdout
    nothing = run("inbox", "release", "billing", "old", *CLOSED, url=url)
    assert (nothing.exit_code, "was not on hold" in nothing.stderr) == (1, True)


@pytest.mark.req("CC-077")
def test_holds_releases_and_purges_are_in_the_audit(url: str) -> None:
    answer("inbox", "hold", "billing", "old", "--reason", "case 7", url=url)
    answer("inbox", "release", "billing", "old", *CLOSED, url=url)
    answer("inbox", "purge", "--operator", "cron", url=url)
    ended, begun, release, hold = answer("audit", "list", url=url)
    assert (release["action"], release["operator"]) == ("inbox release", "bob")
    assert release["details"] == {"consumer": "billing", "tracking_id": "old", "reason": "case closed"}
    assert hold["operator"], "the user's name"
    assert (begun["operator"], begun["details"]["reason"]) == ("cron", "retention")
    assert (ended["action"], ended["details"]["rows"]) == ("inbox purge ended", 1)
    assert run("inbox", "release", "billing", url=url).exit_code == 2, "a reason is required"
    assert answer("audit", "verify", url=url)["broken"] is None


def test_text_from_outside_is_printed_as_it_is(url: str) -> None:
    answer("inbox", "hold", "billing", "[red]x[/red]", "--reason", "[bold]", url=url)
    shown = run("inbox", "holds", url=url).stdout
    assert "[red]x[/red]" in shown
    assert "[bold]" in shown


def test_a_hold_needs_a_reason(url: str) -> None:
    assert run("inbox", "hold", "billing", url=url).exit_code == 2
    empty = run("inbox", "hold", "billing", "--reason", " ", url=url)
    assert (empty.exit_code, "give a reason" in empty.stderr) == (2, True)


def test_a_purge_that_could_not_finish_ends_with_1(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    if url.startswith("sqlite"):
        engine = create_engine(url, connect_args={"timeout": 0})
        with engine.connect() as other:
            other.exec_driver_sql("BEGIN IMMEDIATE")
            monkeypatch.setattr("onceward.cli.database.LOCK_SECONDS", 0.1)
            locked = run("inbox", "purge", url=url)
            other.rollback()
        engine.dispose()
        assert locked.exit_code == 1
        assert "kept the database locked" in locked.stderr
        return
    monkeypatch.setattr(partitions, "SNAPSHOT_WAIT", 0.1)
    engine = create_engine(driven(url), isolation_level="REPEATABLE READ")
    with engine.connect() as other:
        other.execute(text("SELECT 1"))
        blocked = run("inbox", "purge", url=url)
        reported = run("inbox", "purge", "--json", url=url)
    engine.dispose()
    assert (blocked.exit_code, reported.exit_code) == (1, 1)
    assert "Not finished" in blocked.stderr
    assert len(json.loads(reported.stdout)["unfinished"]) == 1


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("where", "code", "says"),
    [
        ("sqlite:////no/such/folder/inbox.db", 2, "directory /no/such/folder does not exist"),
        ("sqlite:////dev/null", 2, "/dev/null is not a database file"),
        ("sqlite:///inbox.db?key=SECRET", 2, "has an unknown setting key; remove it"),
        ("sqlite:////tmp", 2, "/tmp is a directory; name a file"),
        ("sqlite://", 2, "an in-memory database ends with the command"),
        ("inbox.db", 2, "the database is not a valid URL"),
        ("mysql://root@localhost/x", 2, "not 'mysql'"),
        ("postgresql://anna:secret@127.0.0.1:1/x", 1, "cannot reach the database"),
    ],
)
def test_a_database_that_is_not_there_is_one_line(where: str, code: int, says: str) -> None:
    result = run("inbox", "stats", url=where)
    assert result.exit_code == code
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "secret" not in result.stderr


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear database, " * 100)
    result = run("inbox", "stats", url=f"sqlite:///{tmp_path}/letter")
    assert result.exit_code == 1
    assert "not a database" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_url_may_be_that_of_a_program_in_asyncio(url: str) -> None:
    asynchronous = url.replace("sqlite://", "sqlite+aiosqlite://").replace(
        "postgresql://", "postgresql+asyncpg://"
    )
    assert len(answer("inbox", "stats", url=asynchronous)) == 2


def test_the_database_may_be_named_by_the_environment(url: str) -> None:
    result = CliRunner().invoke(app, ["inbox", "stats", "--json"], env={**WIDE, "ONCEWARD_DATABASE": url})
    assert (result.exit_code, len(json.loads(result.stdout))) == (0, 2)
    missing = run("inbox", "stats")
    assert (missing.exit_code, "--database" in missing.stderr) == (2, True)


@pytest.mark.parametrize("group", ["inbox", "consumers"])
def test_help_says_what_happens_and_how_it_ends(group: str) -> None:
    listed = run(group, "--help")
    assert listed.exit_code == 0
    commands = {
        "inbox": ["migrate", "stats", "purge", "hold", "release", "holds", "effects"],
        "consumers": ["list", "show"],
    }[group]
    for command in commands:
        assert command in listed.stdout
        shown = run(group, command, "--help").stdout
        for word in ("--database", "ONCEWARD_DATABASE", "--json", "Exit code: 0"):
            assert word in shown


def test_help_loads_no_database_code() -> None:
    show = "print(sorted({'sqlalchemy', 'rich.table'} & set(sys.modules)))"
    before, after = (
        subprocess.check_output([sys.executable, "-c", f"import sys, {modules}; {show}"], text=True)
        for modules in ("onceward, typer", "onceward.cli.inbox, onceward.cli.consumers")
    )
    assert before == after


def test_ids_and_keys_of_effects_are_whole_on_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    event = "01a1e759-6b6c-78e2-8fc7-7cf222cfd497"
    effect = {"consumer_id": "shipping", "name": "book-carrier", "tracking_id": event, "state": "intended"}
    more = {"effect_key": f"{event}-1-380a90f30808", "intended_at": "2026-11-17T02:32:44.273+00:00"}
    cells = effect_cells({**effect, **more, "expired": True, "error": "TimeoutError: no answer"})
    print_table([cells], EFFECT_COLUMNS, "")
    lines = capsys.readouterr().out.split()
    assert {event, f"{event}-1-380a90f30808", "book-carrier"} <= {*lines}
    assert cells["state"] == ("in doubt, expired", "2026-11-17 02:32:44")
