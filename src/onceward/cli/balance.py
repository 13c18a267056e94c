"""`onceward balance`: whether every message is accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from onceward.cli.database import ELSEWHERE, database_option, default_database
from onceward.cli.exit import FAILED, AsJson, argument, option, refuse_mistakes
from onceward.cli.output import print_json, print_table
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.inspection.balance import Balance
    from onceward.inspection.counts import Account

BALANCE_EXAMPLES = """
Examples:

- `onceward balance shop:app` to check all consumers of an app

- `onceward balance shop:app --consumer charge` to check one of them

- `onceward balance --source sqlite:///orders.db --consumer charge --database sqlite:///shop.db` without the app's code

- `onceward balance shop:app --json | jq '.[].problems'` in scripts
"""


def balance(
    app: Annotated[str | None, argument("MODULE:APP", "The app, as in shop:app.", show_default=False)] = None,
    consumer: Annotated[
        str | None, option("NAME", "One consumer; with --source, its name in inbox and dead letters.")
    ] = None,
    source: Annotated[str | None, option("URL", "Source of one consumer, instead of an app.")] = None,
    database: Annotated[
        str | None,
        database_option("Database of its inbox and dead letters.", f"the app's; with --source, {ELSEWHERE}"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that every message is accounted for: applied, waiting, dead or dropped.

    appended = applied + duplicate + pending + dead + dropped. Numbers that cannot be determined are reported as
    unknown; the rest is checked. It only reads, and works before, during and after a run; a Redis stream is read as a
    whole.

    Exit code: 0 if it holds; 1 if messages are missing, or exist that were never appended; 2 for wrong arguments, for
    something that cannot be reached, or for a --source or --database that does not exist.
    """
    from onceward.connectors.reports import ServerUnreachable
    from onceward.inspection.counts import balance_of

    with refuse_mistakes(as_json, ServerUnreachable):
        accounts = _accounts(app, source, consumer, database)
        struck = {name: balance_of(account) for name, account in accounts.items()}
    if as_json:
        plain = {name: msgspec.to_builtins(each) for name, each in struck.items()}
        print_json([{"consumer": name, "holds": struck[name].holds, **each} for name, each in plain.items()])
    else:
        for name, each in struck.items():
            _show(name, each)
    raise typer.Exit(0 if all(each.holds for each in struck.values()) else FAILED)


def _accounts(
    app: str | None, source: str | None, consumer: str | None, database: str | None
) -> dict[str, Account]:
    """The accounts by the name of the consumer."""
    if (app is None) is (source is None):
        raise ConfigurationError("name an app, as in `onceward balance shop:app`, or a --source, not both")
    return _of_source(str(source), consumer, database) if app is None else _of_app(app, consumer, database)


def _of_source(source: str, consumer: str | None, database: str | None) -> dict[str, Account]:
    from onceward.connectors.urls import Address
    from onceward.inspection.counts import Account

    if consumer is None:
        if database is not None:
            raise ConfigurationError("--database has many consumers; choose one with --consumer NAME")
        return {"": Account(Address(source), "", None)}
    return {consumer: Account(Address(source), consumer, database or default_database())}


def _of_app(app: str, consumer: str | None, database: str | None) -> dict[str, Account]:
    from onceward.app.build import consumer_id
    from onceward.app.lookup import load_app
    from onceward.inspection.counts import Account

    loaded = load_app(app)
    loaded.check()
    names = list(loaded.consumers) if consumer is None else [consumer]
    if unknown := [name for name in names if name not in loaded.consumers]:
        raise ConfigurationError(
            f"{app} has no consumer {unknown[0]!r}; it has {', '.join(loaded.consumers) or 'none'}"
        )
    if not names:
        raise ConfigurationError(f"{app} has no consumers, so there is nothing to balance")
    return {
        name: Account(
            each.source,
            consumer_id(each),
            database or loaded.settings.database,
            contract=each.contract is not None,
            may_be_new=True,
        )
        for name, each in loaded.consumers.items()
        if name in names
    }


def _show(name: str, struck: Balance) -> None:
    both = struck.duplicate is None and struck.applied is not None
    rows = [
        _row("appended", struck.appended, struck),
        {
            "what": "applied or duplicate" if both else "applied",
            "messages": struck.applied,
            "note": struck.notes.get("applied") or (struck.notes.get("duplicate") if both else None),
        },
        *([] if both else [_row("duplicate", struck.duplicate, struck)]),
        _row("pending", struck.pending, struck),
        _row("dead", struck.dead, struck),
        *({"what": "dropped", "messages": count, "note": why} for why, count in struck.dropped.items()),
        *([_row("gone", struck.gone, struck)] if struck.gone else []),
    ]
    columns = {"what": name or "source", "messages": "messages"}
    if any(row["note"] for row in rows):
        columns["note"] = "note"
    texts = [{**row, "messages": _number(row["messages"]), "note": row["note"] or ""} for row in rows]
    print_table(texts, columns, "")
    if not struck.holds:
        for problem in struck.problems:
            typer.secho(f"It does not hold: {problem}.", fg="red", err=True)
    elif struck.appended is None:
        typer.echo("Cannot confirm the balance; found no contradiction.")
    elif struck.appended == 0:
        typer.echo("It holds: nothing was appended.")
    else:
        typer.echo(f"It holds: {_equation(struck)}.")


def _row(what: str, count: int | None, struck: Balance) -> dict[str, Any]:
    return {"what": what, "messages": count, "note": struck.notes.get(what)}


def _number(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _equation(struck: Balance) -> str:
    parts = [
        f"{struck.applied or 0:,} applied{' or duplicate' if struck.duplicate is None else ''}",
        f"{struck.duplicate or 0:,} duplicate",
        f"{struck.pending or 0:,} pending",
        f"{struck.dead or 0:,} dead",
        f"{sum(struck.dropped.values()):,} dropped",
        f"{struck.gone:,} gone",
    ]
    return f"{struck.appended or 0:,} appended = {' + '.join(part for part in parts if not part.startswith('0 '))}"
