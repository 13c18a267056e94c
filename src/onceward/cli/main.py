"""The entry point of the `onceward` command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from onceward.cli.audit import audit
from onceward.cli.boundary import boundary
from onceward.cli.consumers import consumers
from onceward.cli.demo.command import demo
from onceward.cli.dlq import dlq
from onceward.cli.inbox import inbox
from onceward.cli.verify import VERIFY_EXAMPLES, verify

DEMO_EXAMPLES = """
Examples:

- `onceward demo` to watch it

- `onceward demo --orders 20000 --workers 4` for a longer look

- `onceward demo --data ./demo` to look into the queue and the ledger afterwards

- `onceward demo --json | jq .balance` for machines
"""

app = typer.Typer(
    name="onceward",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", epilog=DEMO_EXAMPLES)(demo)
app.add_typer(inbox, name="inbox")
app.add_typer(consumers, name="consumers")
app.add_typer(dlq, name="dlq")
app.add_typer(audit, name="audit")
app.add_typer(boundary, name="boundary")
app.command("verify", epilog=VERIFY_EXAMPLES)(verify)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onceward {version('onceward')}")
        raise typer.Exit


@app.callback(epilog="See it work: `onceward demo`")
def onceward(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
) -> None:
    """Take messages from anywhere and have each effect once in the end, whatever crashes, times out or
    arrives twice."""


def main() -> None:
    """Run the command that the arguments name."""
    app()
