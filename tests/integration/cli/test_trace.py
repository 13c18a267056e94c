"""`onceward trace`: the spans of one transaction as a tree, across processes, with retries and waits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from typer.testing import CliRunner, Result

from onceward.cli.main import app
from onceward.telemetry import metrics
from onceward.telemetry.span_exporter import SpanFileExporter
from onceward.telemetry.span_file import Span, read
from tests.integration.cli.trace_worker import ID
from tests.support import ROOT
from tests.support.wait import until
from tests.support.world import ListSource, World, business, consuming, results, retry, system, transactions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".onceward" / "spans.jsonl"


def run(*arguments: object) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "ONCEWARD_TRACE_FILE": ""}
    return CliRunner().invoke(app, ["trace", *map(str, arguments)], env=environment)


def lines(result: Result) -> list[str]:
    """Without the lines of the tree."""
    assert result.exit_code == 0, result.output
    return [line.lstrip("│├└─ \xa0") for line in result.stdout.splitlines()]


def write(path: Path, *spans: Span) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\n".join(map(msgspec.json.encode, spans)))


def span(name: str, id_: str, parent: str | None, began: float, ended: float, **attributes: Any) -> Span:
    """Spans of the transaction t, in the first seconds of 1970."""
    return Span(
        trace="0" * 32,
        id=id_,
        name=name,
        began=round(began * 1e9),
        ended=round(ended * 1e9),
        process=1,
        parent=parent,
        failed="category" in attributes,
        attributes={"transaction_id": "t", **attributes},
    )


# ── the tree ────────────────────────────────────────────────────────────────────────────────────────────


def test_retries_and_their_backoff_are_lines_of_their_own(world: World, path: Path) -> None:
    task = world.consumer(
        results(system("no answer"), system("no\nanswer"), business("no such account")),
        source=ListSource(transactions(1)),
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SpanFileExporter(path)))
    with metrics.override(provider):
        world.consume(task, consuming(process=retry(5, backoff=0.02)))
    reported = lines(run(path))
    assert reported[0].startswith("t0  failed  ")
    steps = [line.split("  ") for line in reported[1:-2]]
    assert [(step[0], *step[2:]) for step in steps if not step[0].startswith("…")] == [
        (
            "start_processing",
            "BUSINESS: no such account",
            f"outcome failed, Orders, process {os.getpid()}",
        ),
        ("process", "SYSTEM: no answer", "attempt 1 of 5"),
        ("process", "SYSTEM: no answer", "attempt 2 of 5"),
        ("process", "BUSINESS: no such account", "attempt 3 of 5"),
        ("handle_exception",),
    ]
    waits = [line.partition("s before ")[2] for line in reported if line.startswith("…")]
    assert waits == ["attempt 2 of process, backoff 0.02 s", "attempt 3 of process, backoff 0.04 s"]
    assert reported[-1] == f"{path}: 1 transaction, 1 failed: t0"


def test_time_in_the_source_and_between_deliveries_is_shown(path: Path) -> None:
    write(
        path,
        span("start_producing", "a", None, 1.0, 1.002, outcome="succeeded"),
        span("produce", "b", "a", 1.0, 1.001),
        span("start_processing", "c", "b", 3.5, 3.6, outcome="postponed"),
        span("start_processing", "d", "b", 13.6, 14.0, outcome="succeeded"),
        span("bank", "e", "d", 13.8, 13.9),
    )
    assert lines(run(path))[:8] == [
        f"t  succeeded  13.00 s  trace {'0' * 32}",
        "start_producing  2.0 ms  outcome succeeded, process 1",
        "produce  1.0 ms",
        "… 2.50 s in the source",
        "start_processing  100.0 ms  outcome postponed, process 1",
        "… 10.00 s until it was delivered again",
        "start_processing  400.0 ms  outcome succeeded, process 1",
        "bank  100.0 ms",
    ]


@pytest.mark.parametrize(
    ("parents", "why"),
    [
        (("a", "a"), "until it was delivered again"),
        (("a", "b"), "until it was sent again"),
        ((None, None), "until it arrived again"),
    ],
)
def test_a_second_message_with_the_same_id_is_no_second_delivery(
    path: Path, parents: tuple[str | None, str | None], why: str
) -> None:
    """By spans that are in no file, or in another one."""
    first, second = parents
    write(
        path,
        span("start_processing", "c", first, 1.0, 2.0, outcome="succeeded"),
        span("start_processing", "d", second, 5.0, 6.0, outcome="succeeded"),
    )
    assert f"… 3.00 s {why}" in lines(run(path))


def test_a_message_that_is_sent_twice_has_two_trees(path: Path) -> None:
    write(
        path,
        span("start_producing", "a", None, 1.0, 1.5, outcome="succeeded"),
        span("start_processing", "b", "a", 2.0, 3.0, outcome="succeeded"),
        span("start_producing", "c", None, 5.0, 5.5, outcome="succeeded"),
        span("start_processing", "d", "c", 6.0, 7.0, outcome="succeeded"),
    )
    waits = [line for line in lines(run(path)) if line.startswith("…")]
    assert waits == [
        "… 500.0 ms in the source",
        "… 3.50 s until it was sent again",
        "… 500.0 ms in the source",
    ]


def test_a_long_error_is_wrapped_on_a_terminal_and_one_line_elsewhere(path: Path) -> None:
    error = " ".join(f"word{number}" for number in range(25))
    failed = span("start_processing", "a", None, 1.0, 2.0, outcome="failed", category="SYSTEM")
    write(path, msgspec.structs.replace(failed, attributes={**failed.attributes, "exception.message": error}))
    assert any(error in line for line in run(path).stdout.splitlines())
    terminal = {"COLUMNS": "80", "FORCE_COLOR": "1"}
    shown = CliRunner().invoke(app, ["trace", str(path)], env=terminal).stdout
    reported = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()]
    assert max(map(len, reported[:-1])) <= 80
    assert error in " ".join(" ".join(reported).split())


@pytest.mark.req("CC-055")
def test_a_transaction_is_found_in_any_spelling_of_its_id(path: Path) -> None:
    sent = "8B1C2E760F7E4F0E9A5D3F6A1C2B4D5E"
    write(path, span("process", "a", None, 0, 1, transaction_id=sent), span("process", "b", None, 1, 2))
    for spelled in (sent, sent.lower(), "8b1c2e76-0f7e-4f0e-9a5d-3f6a1c2b4d5e", sent[:6]):
        result = run(path, "--transaction", spelled, "--json")
        assert result.exit_code == 0, spelled
        assert json.loads(result.stdout)["transaction_id"] == sent
    assert run(path, "--transaction", sent.lower()[:6]).exit_code == 2


def test_other_transactions_that_it_led_to_are_counted_and_not_shown(path: Path) -> None:
    write(
        path,
        span("start_processing", "a", None, 1.0, 2.0, outcome="succeeded"),
        span("process", "b", "a", 1.0, 1.9, step="process", attempt=0, max_attempts=1),
        span("start_producing", "c", "b", 1.1, 1.2, transaction_id="u", outcome="succeeded"),
        span("start_producing", "d", "b", 1.2, 1.3, transaction_id="v", outcome="failed", category="SYSTEM"),
    )
    reported = run(path, "--transaction", "t").stdout
    assert "+ 2 spans of other transactions" in reported
    assert "start_producing" not in reported
    assert run(path).stdout.startswith("t  succeeded")
    assert run(path, "--failed").stdout.startswith("v  failed")
    plain = json.loads(run(path, "--json").stdout)
    assert plain["parts"][0]["parts"][0]["other_transactions"] == 2


def test_a_late_attempt_of_a_stuck_thread_does_not_change_the_outcome(path: Path) -> None:
    write(
        path,
        span("start_processing", "a", None, 1.0, 2.0, outcome="failed", category="TIMEOUT"),
        span("process", "b", "a", 1.0, 60.0, step="process", attempt=0, category="TIMEOUT"),
    )
    assert run(path).stdout.startswith("t  failed  59.00 s")


# ── across processes, one of them killed ────────────────────────────────────────────────────────────────


def worker(role: str, path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.cli.trace_worker", role, path.parent / "queue.db"],
        cwd=ROOT,
        env={**os.environ, "ONCEWARD_TRACE_FILE": str(path)},
    )


def test_a_transaction_is_one_tree_from_its_producer_over_a_killed_consumer_to_the_next(path: Path) -> None:
    path.parent.mkdir()
    assert worker("produce", path).wait(60) == 0
    victim = worker("fail", path)
    try:
        until(lambda: any(each.process == victim.pid for each in read(path).spans))
    finally:
        victim.kill()
        victim.wait(60)
    assert json.loads(run(path, "--json").stdout)["outcome"] is None

    def has_been_consumed() -> bool:
        assert worker("consume", path).wait(60) == 0
        return any(
            each.name == "start_processing" and each.attributes["outcome"] == "succeeded"
            for each in read(path).spans
        )

    until(has_been_consumed)
    reported = json.loads(run(path, "--json").stdout)
    assert (reported["transaction_id"], reported["outcome"], len(reported["traces"])) == (ID, "succeeded", 1)
    places = {place for place, _ in branches(reported["parts"])}
    assert {
        ("start_producing", "produce", "produce.attempt", "start_processing", "process"),
        (None, "process"),
    } <= places
    processes = {name: part["process"] for (*_, name), part in branches(reported["parts"]) if name in LIVES}
    assert len(set(processes.values())) == 2
    people = run(path).stdout
    assert "not ended: its process was killed or is still working on it" in people
    assert "SYSTEM: the bank does not answer" in people
    assert "card of nobody" not in people + path.read_text()


LIVES = ("start_producing", "start_processing")


def branches(parts: list[dict[str, Any]], above: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    found = []
    for part in parts:
        if "wait" not in part:
            place = (*above, part["span"])
            found += [(place, part), *branches(part["parts"], place)]
    return found


# ── selecting ───────────────────────────────────────────────────────────────────────────────────────────


def lives(*outcomes: str) -> list[Span]:
    return [
        span(
            "start_processing",
            str(number),
            None,
            number,
            number + 0.5,
            transaction_id=f"order-{number}",
            outcome=outcome,
        )
        for number, outcome in enumerate(outcomes)
    ]


def test_last_is_the_newest_file_here_and_its_newest_transaction(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run("last")
    assert refused.exit_code == 2
    assert "run with ONCEWARD_TRACE_FILE=.onceward/spans.jsonl" in refused.stderr
    named = CliRunner().invoke(app, ["trace", "last"], env={"ONCEWARD_TRACE_FILE": "none.jsonl"})
    assert named.exit_code == 2
    assert "none.jsonl cannot be read" in named.stderr
    assert "to write it, set this variable for `onceward run`" in named.stderr
    assert "postgresql://ann:***@db/spans cannot be read" in run("postgresql://ann:hunter2x@db/spans").stderr
    write(path, *lives("succeeded", "failed", "failed", "succeeded"))
    write(path.with_name("old.jsonl"), *lives("failed"))
    os.utime(path.with_name("old.jsonl"), (1, 1))
    assert run("last").stdout.startswith("order-3  succeeded")
    assert run("--failed").stdout.startswith("order-2  failed")
    assert run("last").stdout.endswith("4 transactions, 2 failed: order-2, order-1\n")


def test_a_transaction_is_found_by_the_beginning_of_its_id(path: Path) -> None:
    write(path, *lives(*["failed"] * 12))
    assert run(path, "--transaction", "order-11").stdout.startswith("order-11  ")
    assert run(path, "--transaction", "order-1").stdout.startswith("order-1  ")
    ambiguous = run(path, "--transaction", "order")
    assert ambiguous.exit_code == 2
    assert "order is the beginning of order-11, order-10, order-9, order-8, order-7, …" in ambiguous.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--transaction", "x"), "has no transaction x; it has 1 transaction, none failed"),
        (("--failed",), "has no transaction that failed; it has 1 transaction, none failed"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(path: Path, arguments: tuple[str, ...], message: str) -> None:
    write(path, *lives("succeeded"))
    result = run(path, *arguments, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"].endswith(message)


def test_a_file_that_is_not_there_or_has_no_spans_is_named(path: Path) -> None:
    missing = run(path)
    assert missing.exit_code == 2
    assert f"{path} cannot be read: No such file or directory" in missing.stderr
    path.parent.mkdir()
    path.write_text("{}\n")
    empty = run(path)
    assert empty.exit_code == 2
    assert "has no transaction" in empty.stderr
