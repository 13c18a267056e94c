"""`onceward explain`: what each consumer guarantees, and why not more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward.cli.exit import MISUSED, AsJson, fail
from onceward.cli.output import WIDE, print_json

if TYPE_CHECKING:
    from onceward.app import Onceward
    from onceward.inspection.guarantees import GuaranteeVerdict

EXPLAIN_EXAMPLES = """
Examples:

- `onceward explain shop:app` for all consumers of an app

- `onceward explain shop:app --json | jq '.[] | {consumer, guarantee}'` for machines
"""

STYLES = {"may lose": "bold red", "at least once": "yellow", "effects once": "green", "holds": "dim"}


def explain(
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The app, as in shop:app.")],
    as_json: AsJson = False,
) -> None:
    """Say what each consumer guarantees, its weakest link, and what would mend it.

    It looks at sources, contracts and settings, and asks Redis, PostgreSQL, SQLite and boundaries how durable they are
    set up to be. What cannot be reached is said.

    Exit code: 0, whatever it found; 2 for wrong arguments.
    """
    from onceward.app.lookup import load_app
    from onceward.errors import ConfigurationError
    from onceward.inspection.guarantee_facts import facts_of
    from onceward.inspection.guarantees import judge

    try:
        loaded = load_app(app)
        loaded.check()
        verdicts = {name: judge(facts_of(loaded, each)) for name, each in loaded.consumers.items()}
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    if as_json:
        print_json([_plain(loaded, name, verdict) for name, verdict in verdicts.items()])
        return
    if not verdicts:
        typer.echo(f"{app} has no consumers: nothing is consumed, and nothing guaranteed.")
    for name, verdict in verdicts.items():
        _show(loaded, name, verdict)


def _plain(app: Onceward, name: str, verdict: GuaranteeVerdict) -> dict[str, Any]:
    return {
        "consumer": name,
        "source": str(app.consumers[name].source),
        "guarantee": str(verdict.guarantee),
        "why": verdict.weakest.why,
        "advice": verdict.weakest.advice,
        "links": [
            {"strength": str(link.strength), "why": link.why, "advice": link.advice} for link in verdict.links
        ],
        "not_checked": list(verdict.not_checked),
    }


def _show(app: Onceward, name: str, verdict: GuaranteeVerdict) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    guarantee = str(verdict.guarantee)
    told = f"{guarantee}, as far as it could be checked" if verdict.not_checked else guarantee
    console.print(
        Text.assemble((name, "bold"), f"  {app.consumers[name].source}  ", (told, STYLES[guarantee]))
    )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    for link in verdict.links:
        strength = str(link.strength)
        table.add_row(Text(strength, STYLES[strength]), Text(link.why))
        if link.advice:
            table.add_row("", Text(f"→ {link.advice}", "cyan"))
    for each in verdict.not_checked:
        table.add_row(Text("not checked", "magenta"), Text(each))
    console.print(table)
    console.print()
