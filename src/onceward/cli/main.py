"""The entry point of the `onceward` command."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from onceward.cli.completion import prepare

# Commands whose modules are loaded when they are called: `onceward --help` waits for none of them.


class Named(NamedTuple):
    """A command that is not loaded yet."""

    place: str
    """`module:name` of a function, or of a `Typer` with commands of its own. Examples, if there are any, are in the
    module as `<COMMAND>_EXAMPLES`."""
    help: str
    """The first sentence of its help."""


class LazyGroup(TyperGroup):
    """A group that knows the names of `named`, and what was registered as usual besides."""

    named: dict[str, Named] = {}  # noqa: RUF012  filled by a subclass

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        listed = {
            name: TyperCommand(name, help=each.help, rich_markup_mode=self.rich_markup_mode)
            for name, each in self.named.items()
        }
        self.commands = {**listed, **self.commands}

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)
        _without_types(found)
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in self.named:
            command = self.loaded(name)
            _show_flags_plainly(command, ctx)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _with_value(error)
            raise

    def loaded(self, name: str) -> Any:
        """The command itself."""
        module_name, _, attribute = self.named[name].place.partition(":")
        module = import_module(module_name)
        found = getattr(module, attribute)
        holder = typer.Typer(rich_markup_mode=self.rich_markup_mode, pretty_exceptions_enable=False)
        holder.callback()(lambda: None)  # with it, one command is a group of one
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            examples = getattr(module, f"{name.upper()}_EXAMPLES", None)
            holder.command(name, epilog=examples)(found)
        group: Any = typer.main.get_command(holder)
        return group.commands[name]


def _show_flags_plainly(command: Any, ctx: Any) -> None:
    """`--json`, and not `--json <bool>`: of the command, and of those below it."""
    _without_types(command.get_params(ctx))
    for below in getattr(command, "commands", {}).values():
        _show_flags_plainly(below, ctx)


def _without_types(parameters: list[Any]) -> None:
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""


def _with_value(error: typer.BadParameter) -> str:
    """What is wrong with a value, and the value itself: pydantic, which Typer asks, says "Input" to it."""
    from pydantic import ValidationError

    said = error.message
    if not isinstance(error.__cause__, ValidationError) or not said.startswith("Input "):
        return said
    (problem, *_) = error.__cause__.errors()
    return f"{problem['input']!r} {said.removeprefix('Input ').partition(', unable to parse')[0]}"


COMMANDS = {
    "demo": Named("onceward.demo.command:demo", "Produce, consume, crash and balance some thousand orders."),
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
