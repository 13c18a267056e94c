"""`onceward verify`: prove a consumer, record the proof, or check whether there is one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from onceward._environment import names_production
from onceward._imports import import_name
from onceward._text import quantity
from onceward.cli.completion import envs
from onceward.cli.database import ELSEWHERE, database_option, default_database, dialect_of, open_inbox
from onceward.cli.exit import (
    FAILED,
    MISUSED,
    AsJson,
    argument,
    fail,
    flag,
    option,
    reason_of,
    refuse_mistakes,
)
from onceward.cli.output import WIDE, clean_text, echo, print_json, print_result, progress_bars
from onceward.cli.verify.app import check_junit, examine_all, replace_junit, show_all, write_junit
from onceward.cli.verify.subject import Subject, subject_of, subjects_of
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.inbox import Inbox
    from onceward.verify import ScenarioResult, VerificationReport

VERIFY_EXAMPLES = """
Examples:

- `onceward verify shop:charge` to verify a function of an app, or a class, with the events of its `verification`

- `onceward verify shop:app.consumers.charge` to name it as the app does

- `onceward verify shop:app --all` to verify every consumer of an app, in parallel

- `onceward verify shop.billing:Bill --events orders.jsonl --database postgresql://user@host/name` to run on PostgreSQL

- `onceward verify shop.billing:Bill --record --database URL` to record the proof before production

- `onceward verify shop.billing:Bill --env production --database URL` to check that it may run there

- `onceward verify shop:app --all --out evidence.json --sign-key evidence.key` in CI, to ship the proof with the code
"""


def _scenarios() -> list[str]:
    from onceward.inbox.evidence.scenarios import NAMES

    return list(NAMES)


def _separate(names: list[str] | None) -> list[str] | None:
    return names and [name.strip() for each in names for name in each.split(",")]


def verify(
    consumer: Annotated[
        str,
        argument(
            "MODULE:NAME",
            "The consumer: a function of an app, a class, or a handler of inbox.process. With --all, the app.",
        ),
    ],
    every: Annotated[bool, flag("Verify every consumer of the app that has a contract.", "--all")] = False,
    contract: Annotated[
        str | None, option("MODULE:NAME", "Contract of a handler; a class has its own.")
    ] = None,
    events: Annotated[
        str | None,
        option(
            "FILE|MODULE:NAME",
            "Events: a file of JSON lines, or a list or function in a module.",
            show_default="those of its `verification`",
        ),
    ] = None,
    database: Annotated[
        str | None,
        database_option(
            "The consumer's database, which keeps the evidence. Scenarios run beside it, in their own databases.",
            f"the app's; for a class, {ELSEWHERE}; else SQLite files",
        ),
    ] = None,
    run_on: Annotated[
        str | None, option("URL", "Another server to run the scenarios on.", show_default="as --database")
    ] = None,
    keep: Annotated[bool, flag("Keep the result as evidence in --database.", "--record")] = False,
    only: Annotated[
        list[str] | None,
        option(
            "SCENARIO", "Run only this one, or several with commas; repeatable.", autocompletion=_scenarios
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        option("SCENARIO", "Skip this one, or several with commas; repeatable.", autocompletion=_scenarios),
    ] = None,
    seed: Annotated[int | None, option("N", "The seed that a failure reported.")] = None,
    timeout: Annotated[
        float | None, option("SECONDS", "Maximum time for one delivery.", min=0.1, show_default="10")
    ] = None,
    env: Annotated[
        str | None,
        option(
            "NAME",
            "With `production`, check that --database has evidence for today's code.",
            autocompletion=envs,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option("FILE", "Write the result as evidence, to ship with the code; see --sign-key."),
    ] = None,
    sign_key: Annotated[
        str | None,
        option("FILE", "Private Ed25519 key that signs --out.", show_default="ONCEWARD_SIGNING_KEY"),
    ] = None,
    junit: Annotated[Path | None, option("FILE", "Write JUnit XML, for CI.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a consumer keeps its contract.

    It runs the handler on a real database with duplicates, replays, every order, old and odd forms of its events,
    exceptions and kill -9 at every boundary, and compares the rows with those of one clean delivery. Only a run of
    all scenarios, with an event of every type in the contract, is a proof.

    Exit code: 0 if it passed, 1 if a scenario failed, an event type has no event or evidence is missing, 2 for wrong
    arguments or a database that cannot be used.
    """
    from onceward.verify.evidence_file import EvidenceOutput
    from onceward.verify.report import as_junit

    began = time.monotonic()
    with _exit_on_errors(as_json):
        asks = env is not None and _is_production(env)
        app, subjects = subjects_of(consumer) if every else (None, [subject_of(consumer, contract)])
        if every and (contract or events):
            raise ConfigurationError("--contract and --events belong to one consumer, not to --all")
        database = database or subjects[0].database or default_database()
        if keep and database is None:
            fail(f"--record needs --database URL, or {ELSEWHERE}: evidence is kept there", as_json, MISUSED)
        if asks and not keep and out is None:
            problems = [_missing_evidence(each, database, as_json) for each in subjects]
            _print_verdicts(subjects, problems, as_json, every=every)
            raise typer.Exit(FAILED if any(problems) else 0)
        if junit is not None:
            check_junit(junit)  # before the scenarios run, not after
        if sign_key is not None and out is None:
            raise ConfigurationError("--sign-key signs the file of --out; add --out FILE")
        output = None if out is None else EvidenceOutput(out, sign_key)
        given = {
            "contract": None if contract is None else subjects[0].contract,
            "database": run_on or database,
            "only": _separate(only),
            "skip": _separate(skip),
            "seed": seed,
            "timeout": timeout,
        }
        if keep:  # fail before the scenarios run, not after
            with _open_inbox(str(database), as_json):
                pass
        if app is not None:
            found = examine_all(app, given, as_json)
            reports = [each.report for each in found if each.report is not None]
        else:
            reports = [_examine(subjects[0].code, _events(events), given)]
        if keep:
            with _open_inbox(str(database), as_json) as inbox:
                for report in reports:
                    inbox.record_evidence(report.evidence())
        written = None if output is None else output.write(reports)
        if junit is not None and app is not None:
            write_junit(junit, found)
        elif junit is not None:
            replace_junit(junit, as_junit(reports[0]))
    needs_proof = keep or out is not None
    if app is not None:
        code = show_all(app, found, began, keep, as_json, needs_proof)
        if written is not None and not as_json:
            echo(written)
        raise typer.Exit(code)
    (report,) = reports
    if as_json:
        verdict = {"passed": report.passed, "proves": report.proves, "recorded": keep}
        print_json({**verdict, **msgspec.to_builtins(report)})
    else:
        _show(report, keep)
        if written is not None:
            echo(written)
    raise typer.Exit(0 if (report.proves if needs_proof else report.passed) else FAILED)


@contextmanager
def _exit_on_errors(as_json: bool) -> Iterator[None]:
    """Exit with one line if something keeps the scenarios from running."""
    from sqlalchemy.exc import SQLAlchemyError

    from onceward.verify.children import Broken, Died, Hung

    try:
        with refuse_mistakes(as_json, SQLAlchemyError, OSError, UnicodeEncodeError):
            yield
    except (Broken, Died, Hung) as error:
        fail(f"verification failed to run: {error}", as_json, MISUSED)


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────


def _is_production(env: str) -> bool:
    """Raises for an unknown name: a misspelled `production` would skip the check."""
    from onceward.app.settings import ENVS

    if env.strip().lower() not in ENVS:
        raise ConfigurationError(f"--env must be one of {', '.join(ENVS)}, not {env!r}")
    return names_production(env)


def _events(given: str | None) -> Any:
    if given is None:
        return None
    path = Path(given)
    try:
        if ":" in given and not path.exists():
            return import_name(given)
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        why = reason_of(error)
        raise ConfigurationError(
            f"--events {given} cannot be read: {why}; name a file of JSON lines, or MODULE:NAME"
        ) from None
    return [_event(line, f"{given}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _event(line: str, place: str) -> Any:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{place} is not JSON: {error}; write one event per line") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{place} is not a JSON object; write one event per line")
    return found


# ── the verification ────────────────────────────────────────────────────────────────────────────────────


def _examine(subject: Any, events: Any, given: dict[str, Any]) -> VerificationReport:
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    from onceward.verify import NAMES, examine_consumer

    columns = ("{task.description:24}", BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bars(False, *columns) as bars:
        bar = bars.add_task("preparing", total=len(NAMES))

        def progress(name: str, result: ScenarioResult | None) -> None:
            bars.update(bar, description=name, advance=0 if result is None else 1)

        return examine_consumer(subject, events, progress=progress, **given)


def _show(report: VerificationReport, kept: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from onceward.verify import ScenarioStatus

    styles = {
        ScenarioStatus.PASSED: "green",
        ScenarioStatus.FAILED: "bold red",
        ScenarioStatus.SKIPPED: "dim",
    }
    table = Table("scenario", "result", "seconds", "tried", box=None, pad_edge=False)
    for each in report.scenarios:
        table.add_row(
            each.name,
            Text(each.result, styles[each.result]),
            f"{each.seconds:.1f}",
            clean_text(each.note, "dim"),
        )
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    console.print(table)
    echo("", *str(report).split("\n"))
    if report.not_compared:
        echo(
            f"Not compared, because generated by the database or excluded by you: {', '.join(report.not_compared)}"
        )
    if kept:
        modules = quantity(len(report.code.modules), "module")
        echo(f"Recorded, for code {report.code.digest[:12]} of {modules} on {report.backend}.")


# ── evidence ────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _open_inbox(url: str, as_json: bool) -> Iterator[Inbox]:
    """Exit with MISUSED if the database cannot be used: that is not a failed scenario."""
    try:
        with open_inbox(url, as_json) as inbox:
            yield inbox
    except typer.Exit:
        raise typer.Exit(MISUSED) from None


def _missing_evidence(subject: Subject, url: str | None, as_json: bool) -> str | None:
    """Why a consumer would be refused, by the file of evidence and by the database."""
    from onceward.connectors.reports import ServerUnreachable
    from onceward.inbox.evidence.gate import CarriedEvidence
    from onceward.inspection.proofs import missing_proof

    carried = CarriedEvidence(subject.evidence)
    contract, code = subject.contract, subject.code
    backend = "sqlite" if url is None else dialect_of(url)
    if carried.lacking(contract, code, backend, None) is None:
        return None
    if url is None:
        fail(f"--env needs --database URL, or {ELSEWHERE}: evidence is kept there", as_json, MISUSED)
    if subject.evidence.given:  # as a run does, which creates what is missing in the database
        try:
            return missing_proof(subject.evidence, contract, code, url)
        except ServerUnreachable as error:
            fail(str(error), as_json, MISUSED)
    with _open_inbox(url, as_json) as inbox:
        return carried.lacking(contract, code, backend, inbox.evidence(contract.consumer_id))


def _print_verdicts(
    subjects: list[Subject], problems: list[str | None], as_json: bool, *, every: bool
) -> None:
    verdicts = [_verdict(each, problem) for each, problem in zip(subjects, problems, strict=True)]
    results: Any = [result for result, _ in verdicts]
    if every:
        results = {"passed": not any(problems), "consumers": results}
    print_result(results if every else results[0], [text for _, text in verdicts], as_json)


def _verdict(subject: Subject, problem: str | None) -> tuple[dict[str, Any], str]:
    from onceward.inbox.evidence.proof import refusal

    contract = subject.contract
    text = None if problem is None else refusal(contract, subject.code, problem)
    proven = f"consumer {contract.consumer_id!r} may run in production: it is proven"
    result = {"passed": problem is None, "missing": problem, "refusal": text}
    return result, text or proven
