"""The entry point of the `onceward` command."""

from __future__ import annotations

from typing import Annotated

import typer

from onceward.cli.completion import prepare
from onceward.cli.lazily import LazyGroup, Named

COMMANDS = {
    "demo": Named(
        "onceward.cli.demo.command:demo", "Produce, consume, crash and balance some thousand orders."
    ),
    "new": Named(
        "onceward.cli.new:new",
        "Write a small project: a producer, a consumer with a contract and its proof, settings, dashboards.",
    ),
    "run": Named("onceward.cli.run:run", "Run the consumers of an app, until told to stop."),
    "verify": Named("onceward.cli.verify:verify", "Prove that a consumer keeps its contract."),
    "config": Named("onceward.cli.config:config", "Show every setting, and where its value came from."),
    "explain": Named(
        "onceward.cli.explain:explain",
        "Say what each consumer guarantees, its weakest link, and what would mend it.",
    ),
    "balance": Named(
        "onceward.cli.balance:balance",
        "Check that every message is accounted for: applied, waiting, dead or dropped.",
    ),
    "trace": Named(
        "onceward.cli.trace:trace",
        "Print what happened to a transaction, in all its processes: spans, retries and waits.",
    ),
    "inbox": Named("onceward.cli.inbox:inbox", "The inbox's tables: make them, look into them, purge them."),
    "consumers": Named("onceward.cli.consumers:consumers", "Who consumes, and under which contract."),
    "dlq": Named(
        "onceward.cli.dlq:dlq", "Dead letters: what failed for good. See it, mend it, send it again."
    ),
    "audit": Named(
        "onceward.cli.audit:audit", "What operators did: append-only, and each row sealed by the next."
    ),
    "boundary": Named(
        "onceward.cli.boundary:boundary",
        "A durable log of facts with named cursors: serve it, append, fetch, confirm.",
    ),
    "completion": Named(
        "onceward.cli.completion:completion",
        "Print the script that makes the tab key complete commands and options.",
    ),
}
"""With the first sentence of each one's help: nothing is loaded for a list of them."""


class Commands(LazyGroup):
    named = COMMANDS


app = typer.Typer(
    name="onceward",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

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
    prepare()
    app()
