"""`onceward balance`: whether every message is accounted for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from onceward.cli.database import ELSEWHERE, database_option, default_database
from onceward.cli.exit import FAILED, UNKNOWN, AsJson, argument, flag, option, refuse_mistakes
from onceward.cli.output import echo, print_json, print_lines, print_table
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.inspection.balance import Balance
    from onceward.inspection.counts import Account
    from onceward.inspection.outbox_balance import TargetAccount

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
    verbose: Annotated[
        bool,
        flag(
            "Also print sources, equations, reasons of what was dropped, and all missing ids.",
            "--verbose",
            "-v",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that every message is accounted for: applied, waiting, dead or dropped.

    appended = applied + duplicate + pending + dead + dropped. It looks up each message by its id, if the source lists
    its messages, and reports what it cannot determine as unknown. It only reads, and works before, during and after a
    run; it reads the whole of a Redis stream.

    Each target of the app's outbox has a line, too: committed = published + waiting + dead + canceled + removed after
    the retention, and it looks for published messages at the sink. In such a line, appended means committed, applied
    means published, and pending means waiting.

    Exit code: 0 if it holds; 1 if messages are missing, or exist that were never appended; 2 for wrong arguments, or
    for a --source, or its --database, that does not exist or cannot be reached; 3 if it is unknown whether it holds, as
    for the consumers of an app whose broker or database is down.
    """
    from onceward.connectors.reports import ServerUnreachable
    from onceward.inspection.counts import balance_of

    with refuse_mistakes(as_json, ServerUnreachable):
        accounts, targets = _accounts(app, source, consumer, database)
        struck = {name: balance_of(account) for name, account in accounts.items()}
        struck |= {name: each.balance for name, each in targets.items()}
        if not struck:
            raise ConfigurationError(
                f"{app} has no consumers and has sent nothing, so there is nothing to balance"
            )
    if as_json:
        print_json([_as_dict(name, each) for name, each in struck.items()])
    else:
        sources = {name: str(account.source) for name, account in accounts.items()}
        _show(struck, sources | {name: each.sink for name, each in targets.items()}, verbose)
    if any(each.problems for each in struck.values()):
        raise typer.Exit(FAILED)
    raise typer.Exit(0 if all(each.holds for each in struck.values()) else UNKNOWN)


def _as_dict(name: str, struck: Balance) -> dict[str, Any]:
    return {
        "consumer": name,
        "verdict": struck.verdict,
        "holds": struck.holds,
        **{key: value for key, value in msgspec.to_builtins(struck).items() if key != "words"},
    }


def _accounts(
    app: str | None, source: str | None, consumer: str | None, database: str | None
) -> tuple[dict[str, Account], dict[str, TargetAccount]]:
    """The accounts by the name of the consumer, and those of the outbox."""
    if (app is None) is (source is None):
        raise ConfigurationError("name an app, as in `onceward balance shop:app`, or a --source, not both")
    if app is None:
        return _of_source(str(source), consumer, database), {}
    return _of_app(app, consumer, database)


def _of_source(source: str, consumer: str | None, database: str | None) -> dict[str, Account]:
    from onceward.connectors.urls import Address
    from onceward.inspection.counts import Account

    if consumer is None:
        if database is not None:
            raise ConfigurationError("--database has many consumers; choose one with --consumer NAME")
        return {"": Account(Address(source), "", None)}
    return {consumer: Account(Address(source), consumer, database or default_database())}


def _of_app(
    app: str, consumer: str | None, database: str | None
) -> tuple[dict[str, Account], dict[str, TargetAccount]]:
    from onceward.app.app import RELAY
    from onceward.app.lookup import load_app
    from onceward.inspection.counts import account_of
    from onceward.inspection.outbox_balance import balance_outbox
    from onceward.outbox.targets import address

    loaded = load_app(app)
    loaded.check()
    names = list(loaded.consumers) if consumer is None else [consumer]
    if unknown := [name for name in names if name not in (*loaded.consumers, RELAY)]:
        raise ConfigurationError(
            f"{app} has no consumer {unknown[0]!r}; it has {', '.join(loaded.consumers) or 'none'}"
        )
    targets: dict[str, TargetAccount] = {}
    if consumer in (None, RELAY):
        address_of = partial(address, targets=loaded.outbox.targets)
        targets = balance_outbox(database or loaded.settings.database, address_of)
    return {
        name: account_of(loaded, each, database) for name, each in loaded.consumers.items() if name in names
    }, targets


NUMBERS = ("appended", "applied", "duplicate", "done", "pending", "dead", "dropped", "gone")
RARE = {"done": 0, "dropped": 0, "gone": 0}
"""Columns that are left out where nothing is in them."""


def _show(struck: dict[str, Balance], sources: dict[str, str], verbose: bool) -> None:
    """One table for all consumers, each note once, the verdict; with `verbose` the details."""
    columns = {name: name for name in ("consumer", *NUMBERS, "holds")}
    rows = [_row(name, each) for name, each in struck.items()]
    usual: dict[str, Any] = dict(RARE)
    if all(row["done"] for row in rows):  # without a contract
        usual |= {"applied": "?"}
    if len(rows) == 1:
        del columns["holds"]
    print_table(rows, columns, "", usual=usual, right=NUMBERS)
    _show_notes(struck)
    if verbose:
        for name, each in struck.items():
            _show_details(name, sources[name], each)
    _show_verdict(struck)


def _row(name: str, struck: Balance) -> dict[str, Any]:
    numbers = {each: getattr(struck, each) for each in NUMBERS} | {"dropped": sum(struck.dropped.values())}
    shown = {each: "?" if number is None else number for each, number in numbers.items()}
    holds = "no" if struck.problems else "yes" if struck.holds else "?"
    return {"consumer": name or "source", **shown, "holds": holds}


def _show_notes(struck: dict[str, Balance]) -> None:
    concerned: dict[tuple[str, str], list[str]] = {}
    for name, each in struck.items():
        for number, note in each.notes.items():
            if number != "appended" or each.appended is not None:  # otherwise the verdict says it
                concerned.setdefault((each.words.get(number, number), note), []).append(name)
    for (number, note), names in concerned.items():
        whose = f" of {', '.join(names)}" if len(struck) > 1 else ""
        print_lines(f"{number}{whose}: {note}")
    if concerned:
        echo("")


def _show_details(name: str, source: str, struck: Balance) -> None:
    echo(f"{name or 'source'}  {source}")
    echo(f"  {_equation(struck)}")
    for reason, count in struck.dropped.items():
        echo(f"  dropped: {count:,} {reason}")
    for each in struck.missing:
        echo(f"  missing: {each}")
    echo("")


def _show_verdict(struck: dict[str, Balance]) -> None:
    problems: dict[str, list[str]] = {}
    doubts: dict[str, list[str]] = {}
    for name, each in struck.items():
        for problem in each.problems:
            problems.setdefault(problem, []).append(name)
        for doubt in each.unknown if not each.problems else ():
            doubts.setdefault(doubt, []).append(name)
    for problem, names in problems.items():
        print_lines(f"It does not hold: {_of(names, struck)}{problem}.", color="red", err=True)
    for doubt, names in doubts.items():
        print_lines(f"Unknown whether it holds: {_of(names, struck)}{doubt}.", color="yellow", err=True)
    holding = [each for each in struck.values() if each.holds]
    if len(struck) > 1:
        what = "consumers and targets" if any(each.words for each in struck.values()) else "consumers"
        echo(f"It holds for {len(holding)} of {len(struck)} {what}.")
    elif holding:
        [only] = holding
        nothing = f"nothing was {only.words.get('appended', 'appended')}"
        echo(f"It holds: {_equation(only) if only.appended else nothing}.")


def _of(names: list[str], struck: dict[str, Balance]) -> str:
    return f"{', '.join(names)}: " if len(struck) > 1 else ""


def _equation(struck: Balance) -> str:
    numbers, words = _row("", struck), struck.words
    parts = [
        f"{numbers[name]:,} {words.get(name, name)}" for name in NUMBERS[1:] if numbers[name] not in (0, "?")
    ]
    appended = "?" if struck.appended is None else f"{struck.appended:,}"
    return f"{appended} {words.get('appended', 'appended')} = {' + '.join(parts) or 0}"
