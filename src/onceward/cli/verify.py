"""`onceward verify`: prove a consumer, record the proof, or check whether there is one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward._imports import import_name
from onceward._text import quantity
from onceward.cli.completion import envs
from onceward.cli.database import ELSEWHERE, database_option, default_database, open_inbox
from onceward.cli.exit import FAILED, MISUSED, AsJson, fail
from onceward.cli.output import WIDE, print_json
from onceward.cli.verify_subject import Subject, subject_of

if TYPE_CHECKING:
    from rich.console import Console

    from onceward.inbox import Inbox
    from onceward.verify import Report, ScenarioResult

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
        typer.Argument(
            metavar="MODULE:NAME",
            help="The consumer: a function of an app, a class, or a handler of inbox.process.",
        ),
    ],
    contract: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Contract of a handler; a class has its own."),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|MODULE:NAME",
            show_default="those of its `verification`",
            help="Events: a file of JSON lines, or a list or function in a module.",
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
        str | None,
        typer.Option(
            metavar="URL", show_default="as --database", help="Another server to run the scenarios on."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--record", help="Keep the result as evidence in --database.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="SCENARIO", autocompletion=_scenarios, help="Run only this one; repeatable."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="SCENARIO", autocompletion=_scenarios, help="Skip this one; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The seed that a failure reported.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", show_default="10", help="Maximum time for one delivery."),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=envs,
            help="With `production`, check that --database has evidence for today's code.",
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML, for CI.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a consumer keeps its contract.

    Runs its handler on a real database through duplicates, replay, every order, old and odd forms of its events,
    exceptions and kill -9 at every boundary, and compares the rows with those of one clean delivery.

    Exit code: 0 if it passed, 1 if a scenario failed or evidence is missing, 2 for wrong arguments or a database
    that cannot be used.
    """
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
        if junit is not None:
            _check_directory(junit)
        given = {
            "contract": None if contract is None else subject.contract,
            "database": run_on or database,
            "only": only,
            "skip": skip,
            "seed": seed,
            "timeout": timeout,
        }
        if keep:
            _check_database(str(database), as_json)
        report = _examine(subject.code, _events(events), given)
        if keep:
            _keep(report, str(database), as_json)
        if junit is not None:
            _write_junit(report, junit)
    if as_json:
        print_json(_plain(report, keep))
    else:
        _show(report, keep)
    raise typer.Exit(0 if report.passed else FAILED)


@contextmanager
def _exit_on_errors(as_json: bool) -> Iterator[None]:
    """Exit with one line if something keeps the scenarios from running."""
    from sqlalchemy.exc import SQLAlchemyError

    from onceward.errors import ConfigurationError
    from onceward.verify.children import Broken, Died, Hung

    try:
        yield
    except (ConfigurationError, SQLAlchemyError, OSError) as error:
        fail(str(error), as_json, MISUSED)
    except (Broken, Died, Hung) as error:
        fail(f"verification failed to run: {error}", as_json, MISUSED)


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────


def _is_production(env: str) -> bool:
    """Raises for an unknown name: a misspelled `production` would skip the check."""
    from onceward.app.settings import ENVS
    from onceward.errors import ConfigurationError
    from onceward.inbox.evidence.evidence import is_production

    if env.strip().lower() not in ENVS:
        raise ConfigurationError(f"--env must be one of {', '.join(ENVS)}, not {env!r}")
    return is_production(env)


def _check_directory(junit: Path) -> None:
    """Fail before the scenarios run, not after."""
    from onceward.errors import ConfigurationError

    if not junit.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--junit {junit} cannot be written: directory {junit.parent} does not exist"
        )


def _events(given: str | None) -> Any:
    if given is None:
        return None
    from onceward.errors import ConfigurationError

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
    from onceward.errors import ConfigurationError

    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{place} is not JSON: {error}; write one event per line") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{place} is not a JSON object; write one event per line")
    return found


# ── the verification ────────────────────────────────────────────────────────────────────────────────────


def _examine(subject: Any, events: Any, given: dict[str, Any]) -> Report:
    from rich.console import Console

    from onceward.verify import examine_consumer

    console = Console(stderr=True)
    if not console.is_terminal:
        return examine_consumer(subject, events, **given)
    return _examine_with_progress(subject, events, given, console)


def _examine_with_progress(subject: Any, events: Any, given: dict[str, Any], console: Console) -> Report:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from onceward.verify import NAMES, examine_consumer

    columns = (TextColumn("{task.description:24}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("preparing", total=len(NAMES))

        def progress(name: str, result: ScenarioResult | None) -> None:
            bars.update(bar, description=name, advance=0 if result is None else 1)

        return examine_consumer(subject, events, progress=progress, **given)


def _show(report: Report, kept: bool) -> None:
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


def _plain(report: Report, kept: bool) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(report)
    return {"passed": report.passed, "recorded": kept, **fields}


def _write_junit(report: Report, path: Path) -> None:
    from onceward.verify.report import as_junit

    path.write_text(as_junit(report))


# ── evidence ────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _open_inbox(url: str, as_json: bool) -> Iterator[Inbox]:
    """Exit with MISUSED if the database cannot be used: that is not a failed scenario."""
    try:
        with open_inbox(url, as_json) as inbox:
            yield inbox
    except typer.Exit:
        raise typer.Exit(MISUSED) from None


def _check_database(url: str, as_json: bool) -> None:
    """Fail before the scenarios run, not after."""
    with _open_inbox(url, as_json):
        pass


def _keep(report: Report, url: str, as_json: bool) -> None:
    with _open_inbox(url, as_json) as inbox:
        inbox.record_evidence(report.evidence())


def _missing_evidence(subject: Subject, url: str, as_json: bool) -> str | None:
    from onceward.inbox.evidence.evidence import lacking

    with _open_inbox(url, as_json) as inbox:
        found = inbox.evidence(subject.contract.consumer_id)
    return lacking(subject.contract, subject.code, found)


def _print_verdict(subject: Subject, problem: str | None, as_json: bool) -> None:
    from onceward.inbox.evidence.evidence import refusal

    contract = subject.contract
    text = None if problem is None else refusal(contract, subject.code, problem)
    if as_json:
        print_json({"passed": problem is None, "missing": problem, "refusal": text})
    else:
        proven = f"consumer {contract.consumer_id!r} may run in production: its code is proven"
        typer.echo(text or proven)
