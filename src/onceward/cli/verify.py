"""`onceward verify`: proves a consumer, records the proof, or asks whether there is one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward._importing import import_name
from onceward._text import quantity
from onceward.cli.completion import envs
from onceward.cli.database import ELSEWHERE, database_option, default_database, opened
from onceward.cli.exit import FAILED, MISUSED, AsJson, fail
from onceward.cli.output import WIDE, print_json
from onceward.cli.verify_subject import Subject, subject_of

if TYPE_CHECKING:
    from rich.console import Console

    from onceward.inbox import Inbox
    from onceward.verify import Report, ScenarioResult

VERIFY_EXAMPLES = """
Examples:

- `onceward verify shop:charge` a function of an app, with what is said in its `verification`; or its class

- `onceward verify shop:app.consumers.charge` the same, by the name that the app knows it by

- `onceward verify shop.billing:Bill --events orders.jsonl --database postgresql://user@host/name` on PostgreSQL

- `onceward verify shop.billing:Bill --record --database URL` before it goes to production

- `onceward verify shop.billing:Bill --env production --database URL` to ask whether it may run there
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
        typer.Option(metavar="MODULE:NAME", help="The contract of a handler; a class has its own."),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|MODULE:NAME",
            show_default="those of `verification` on the class",
            help="Events: a file of JSON lines, or a list or function in a module.",
        ),
    ] = None,
    database: Annotated[
        str | None,
        database_option(
            "The consumer's database: evidence is kept in it. Scenarios run beside it, in databases of their own.",
            f"that of the app; of a class, {ELSEWHERE}; else SQLite files",
        ),
    ] = None,
    run_on: Annotated[
        str | None,
        typer.Option(
            metavar="URL", show_default="as --database", help="Another server for the scenarios to run on."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--record", help="Keep the result as evidence in --database.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCENARIO", autocompletion=_scenarios, help="Run this and not all; may be repeated."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="SCENARIO", autocompletion=_scenarios, help="Leave this out; may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="As a failure reported it.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", show_default="10", help="What one delivery may take."),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=envs,
            help="`production`: ask whether --database has evidence for today's code.",
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML, for CI.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a consumer keeps its contract.

    Its own handler runs on a real database through duplicates, replay, every order, old and odd forms of its
    events, exceptions and kill -9 at every boundary; the rows are compared with those of one clean delivery.

    Exit code: 0 if it passed, 1 if a scenario failed or evidence is missing, 2 for wrong arguments or a database
    that cannot be used.
    """
    with _refusing(as_json):
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
            problem = _lacking(subject, str(database), as_json)
            _say_whether(subject, problem, as_json)
            raise typer.Exit(FAILED if problem else 0)
        if junit is not None:
            _check_folder(junit)
        given = {
            "contract": None if contract is None else subject.contract,
            "database": run_on or database,
            "only": only,
            "skip": skip,
            "seed": seed,
            "timeout": timeout,
        }
        if keep:
            _open_once(str(database), as_json)
        report = _examined(subject.code, _events(events), given)
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
def _refusing(as_json: bool) -> Iterator[None]:
    """Whatever kept the scenarios from running is told in one line."""
    from sqlalchemy.exc import SQLAlchemyError

    from onceward.errors import ConfigurationError
    from onceward.verify.children import Broken, Died, Hung

    try:
        yield
    except (ConfigurationError, SQLAlchemyError, OSError) as error:
        fail(str(error), as_json, MISUSED)
    except (Broken, Died, Hung) as error:
        fail(f"the verification could not be made: {error}", as_json, MISUSED)


# ── what is given ───────────────────────────────────────────────────────────────────────────────────────


def _is_production(env: str) -> bool:
    """A misspelt name would not be asked about."""
    from onceward.app.settings import ENVS
    from onceward.errors import ConfigurationError
    from onceward.inbox.evidence.evidence import is_production

    if env.strip().lower() not in ENVS:
        raise ConfigurationError(f"--env must be one of {', '.join(ENVS)}, not {env!r}")
    return is_production(env)


def _check_folder(junit: Path) -> None:
    """Before the scenarios run: it would be a pity to find out afterwards."""
    from onceward.errors import ConfigurationError

    if not junit.absolute().parent.is_dir():
        raise ConfigurationError(f"--junit {junit} cannot be written: there is no directory {junit.parent}")


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
        raise ConfigurationError(f"{place} is no JSON: {error}; each line is an event of its own") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{place} is no JSON object; each line is an event of its own")
    return found


# ── the verification ────────────────────────────────────────────────────────────────────────────────────


def _examined(subject: Any, events: Any, given: dict[str, Any]) -> Report:
    from rich.console import Console

    from onceward.verify import examine_consumer

    console = Console(stderr=True)
    if not console.is_terminal:
        return examine_consumer(subject, events, **given)
    return _examined_in_sight(subject, events, given, console)


def _examined_in_sight(subject: Any, events: Any, given: dict[str, Any], console: Console) -> Report:
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
            f"Not compared, because the database generates it or you said so: {', '.join(report.not_compared)}"
        )
    if kept:
        modules = quantity(len(report.code.modules), "module")
        typer.echo(f"Recorded, for code {report.code.digest[:12]} of {modules}.")


def _plain(report: Report, kept: bool) -> dict[str, Any]:
    import msgspec

    told: dict[str, Any] = msgspec.to_builtins(report)
    return {"passed": report.passed, "recorded": kept, **told}


def _write_junit(report: Report, path: Path) -> None:
    from onceward.verify.report import as_junit

    path.write_text(as_junit(report))


# ── evidence ────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _opened(url: str, as_json: bool) -> Iterator[Inbox]:
    """A database that cannot be used is no failed scenario."""
    try:
        with opened(url, as_json) as inbox:
            yield inbox
    except typer.Exit:
        raise typer.Exit(MISUSED) from None


def _open_once(url: str, as_json: bool) -> None:
    """Before the scenarios run: it would be a pity to find out afterwards."""
    with _opened(url, as_json):
        pass


def _keep(report: Report, url: str, as_json: bool) -> None:
    from onceward._sync import run_blocking
    from onceward.inbox.evidence.evidence import record

    with _opened(url, as_json) as inbox:
        run_blocking(inbox._ports.transact(record, inbox._store, report.evidence()))


def _lacking(subject: Subject, url: str, as_json: bool) -> str | None:
    from onceward._sync import run_blocking
    from onceward.inbox.evidence.evidence import lacking, recorded

    with _opened(url, as_json) as inbox:
        found = run_blocking(inbox._ports.transact(recorded, inbox._store, subject.contract.consumer_id))
    return lacking(subject.contract, subject.code, found)


def _say_whether(subject: Subject, problem: str | None, as_json: bool) -> None:
    from onceward.inbox.evidence.evidence import refusal

    contract = subject.contract
    told = None if problem is None else refusal(contract, subject.code, problem)
    if as_json:
        print_json({"passed": problem is None, "missing": problem, "refusal": told})
    else:
        proven = f"consumer {contract.consumer_id!r} may run in production: its code is proven"
        typer.echo(told or proven)
