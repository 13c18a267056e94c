"""`onceward verify`: prove a consumer, record the proof, or check whether there is one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from onceward._imports import import_name
from onceward._text import quantity
from onceward.cli.completion import envs
from onceward.cli.database import ELSEWHERE, database_option, default_database, open_inbox
from onceward.cli.exit import FAILED, MISUSED, AsJson, argument, fail, flag, option, refuse_mistakes
from onceward.cli.output import WIDE, print_json, print_result, progress_bars
from onceward.cli.verify_subject import Subject, subject_of
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.inbox import Inbox
    from onceward.verify import ScenarioResult, VerificationReport

VERIFY_EXAMPLES = """
Examples:

- `onceward verify shop:charge` to verify a function of an app, or a class, with the events of its `verification`

- `onceward verify shop:app.consumers.charge` to name it as the app does

- `onceward verify shop.billing:Bill --events orders.jsonl --database postgresql://user@host/name` to run on PostgreSQL

- `onceward verify shop.billing:Bill --record --database URL` to record the proof before production

- `onceward verify shop.billing:Bill --env production --database URL` to check that it may run there
"""


def _scenarios() -> list[str]:
    from onceward.verify.report import NAMES

    return list(NAMES)


def verify(
    consumer: Annotated[
        str,
        argument(
            "MODULE:NAME", "The consumer: a function of an app, a class, or a handler of inbox.process."
        ),
    ],
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
        list[str] | None, option("SCENARIO", "Run only this one; repeatable.", autocompletion=_scenarios)
    ] = None,
    skip: Annotated[
        list[str] | None, option("SCENARIO", "Skip this one; repeatable.", autocompletion=_scenarios)
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
    junit: Annotated[Path | None, option("FILE", "Write JUnit XML, for CI.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a consumer keeps its contract.

    Runs its handler on a real database through duplicates, replay, every order, old and odd forms of its events,
    exceptions and kill -9 at every boundary, and compares the rows with those of one clean delivery.

    Exit code: 0 if it passed, 1 if a scenario failed or evidence is missing, 2 for wrong arguments or a database
    that cannot be used.
    """
    from onceward.verify.report import as_junit

    with _exit_on_errors(as_json):
        asks = env is not None and _is_production(env)
        subject = subject_of(consumer, contract)
        database = database or subject.database or default_database()
        if (keep or asks) and database is None:
            fail(
                f"{'--record' if keep else '--env'} needs --database URL, or {ELSEWHERE}: evidence is kept there",
                as_json,
                MISUSED,
            )
        if asks and not keep:
            problem = _missing_evidence(subject, str(database), as_json)
            _print_verdict(subject, problem, as_json)
            raise typer.Exit(FAILED if problem else 0)
        if junit is not None and not junit.absolute().parent.is_dir():  # before the scenarios run, not after
            raise ConfigurationError(
                f"--junit {junit} cannot be written: directory {junit.parent} does not exist"
            )
        given = {
            "contract": None if contract is None else subject.contract,
            "database": run_on or database,
            "only": only,
            "skip": skip,
            "seed": seed,
            "timeout": timeout,
        }
        if keep:  # fail before the scenarios run, not after
            with _open_inbox(str(database), as_json):
                pass
        report = _examine(subject.code, _events(events), given)
        if keep:
            with _open_inbox(str(database), as_json) as inbox:
                inbox.record_evidence(report.evidence())
        if junit is not None:
            junit.write_text(as_junit(report))
    if as_json:
        print_json({"passed": report.passed, "recorded": keep, **msgspec.to_builtins(report)})
    else:
        _show(report, keep)
    raise typer.Exit(0 if report.passed else FAILED)


@contextmanager
def _exit_on_errors(as_json: bool) -> Iterator[None]:
    """Exit with one line if something keeps the scenarios from running."""
    from sqlalchemy.exc import SQLAlchemyError

    from onceward.verify.children import Broken, Died, Hung

    try:
        with refuse_mistakes(as_json, SQLAlchemyError, OSError):
            yield
    except (Broken, Died, Hung) as error:
        fail(f"verification failed to run: {error}", as_json, MISUSED)


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────


def _is_production(env: str) -> bool:
    """Raises for an unknown name: a misspelled `production` would skip the check."""
    from onceward.app.settings import ENVS
    from onceward.inbox.evidence.evidence import is_production

    if env.strip().lower() not in ENVS:
        raise ConfigurationError(f"--env must be one of {', '.join(ENVS)}, not {env!r}")
    return is_production(env)


def _events(given: str | None) -> Any:
    if given is None:
        return None
    path = Path(given)
    if ":" in given and not path.exists():
        return import_name(given)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
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
            each.name, Text(each.result, styles[each.result]), f"{each.seconds:.1f}", Text(each.note, "dim")
        )
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    console.print(table)
    typer.echo(f"\n{report}")
    if report.not_compared:
        typer.echo(
            f"Not compared, because generated by the database or excluded by you: {', '.join(report.not_compared)}"
        )
    if kept:
        modules = quantity(len(report.code.modules), "module")
        typer.echo(f"Recorded, for code {report.code.digest[:12]} of {modules}.")


# ── evidence ────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _open_inbox(url: str, as_json: bool) -> Iterator[Inbox]:
    """Exit with MISUSED if the database cannot be used: that is not a failed scenario."""
    try:
        with open_inbox(url, as_json) as inbox:
            yield inbox
    except typer.Exit:
        raise typer.Exit(MISUSED) from None


def _missing_evidence(subject: Subject, url: str, as_json: bool) -> str | None:
    from onceward.inbox.evidence.evidence import lacking

    with _open_inbox(url, as_json) as inbox:
        found = inbox.evidence(subject.contract.consumer_id)
    return lacking(subject.contract, subject.code, found)


def _print_verdict(subject: Subject, problem: str | None, as_json: bool) -> None:
    from onceward.inbox.evidence.evidence import refusal

    contract = subject.contract
    text = None if problem is None else refusal(contract, subject.code, problem)
    proven = f"consumer {contract.consumer_id!r} may run in production: its code is proven"
    result = {"passed": problem is None, "missing": problem, "refusal": text}
    print_result(result, text or proven, as_json)
