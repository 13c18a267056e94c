"""The entry point of the `onceward` command.

The module of a command is loaded when the command is called, so `onceward --help` waits for none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from onceward.cli.completion import prepare

USAGE_ERROR: Any = typer.BadParameter.__base__
"""All errors about arguments; typer does not export it."""


class LazyGroup(TyperGroup):
    """A group of the commands in `lazy`, plus those registered as usual."""

    lazy: dict[str, str] = {}  # noqa: RUF012  filled by a subclass

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        stubs = {
            name: TyperCommand(name, help=text, rich_markup_mode=self.rich_markup_mode)
            for name, text in self.lazy.items()
        }
        self.commands = {**stubs, **self.commands}

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)
        _without_types(found)
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in self.lazy:
            command = self.load(name)
            _show_flags_plainly(command, ctx)
        return name, command, rest

    def make_context(self, info_name: Any, args: list[str], *given: Any, **more: Any) -> Any:
        _remember(args)
        with _clean_mistakes():
            return super().make_context(info_name, args, *given, **more)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from onceward.cli.help import load_formatter

        load_formatter()
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with _clean_mistakes():
            return super().invoke(ctx)

    def load(self, name: str) -> Any:
        """Import the command itself."""
        module, inner = import_module(module_of(name)), name.replace("-", "_")
        found = getattr(module, inner)
        holder = typer.Typer(rich_markup_mode=self.rich_markup_mode, pretty_exceptions_enable=False)
        holder.callback()(lambda: None)  # makes a group even of one command
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            examples = getattr(module, f"{inner.upper()}_EXAMPLES", None)
            holder.command(name, epilog=examples)(found)
        group: Any = typer.main.get_command(holder)
        return group.commands[name]


def _show_flags_plainly(command: Any, ctx: Any) -> None:
    """Show `--json`, not `--json <bool>`, in the help of the command and its subcommands."""
    _without_types(command.get_params(ctx))
    for below in getattr(command, "commands", {}).values():
        _show_flags_plainly(below, ctx)


def _without_types(parameters: list[Any]) -> None:
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""


def _remember(arguments: list[str]) -> None:
    """Show no password of a URL, also if it is not where a URL belongs, and only a part of it is quoted."""
    for url in arguments:
        if "://" in url or "@" in url:
            from onceward._secrets import remember

            remember(url.partition("=")[2] if url.startswith("--") else url)


@contextmanager
def _clean_mistakes() -> Iterator[None]:
    """Have the message about wrong arguments show no passwords, and control no terminal."""
    from onceward._secrets import mask
    from onceward._text import printable

    try:
        yield
    except USAGE_ERROR as error:
        wrong: Any = error
        message = _with_value(wrong) if isinstance(wrong, typer.BadParameter) else wrong.message
        wrong.message = printable(mask(message or ""))
        raise


def _with_value(error: typer.BadParameter) -> str:
    """The problem with the value itself in place of the word "Input" that pydantic uses."""
    from pydantic import ValidationError

    message = error.message
    if not isinstance(error.__cause__, ValidationError) or not message.startswith("Input "):
        return message
    (problem, *_) = error.__cause__.errors()
    return f"{problem['input']!r} {message.removeprefix('Input ').partition(', unable to parse')[0]}"


COMMANDS = {
    "demo": "Produce, consume, crash and balance a few thousand orders.",
    "new": "Create a small project: a web service, a consumer with a contract and its proof, migrations, an image, CI.",
    "run": "Run the consumers of an app until stopped.",
    "console": "Serve the console of an app: what runs, what waits, what died, and what to do about it.",
    "relay": "Relay the outbox of an app until stopped.",
    "end-worker": "End a worker process of a run on this machine; its supervisor starts another one.",
    "verify": "Prove that a consumer keeps its contract.",
    "config": "Show every setting and where its value came from.",
    "explain": "Show what each consumer guarantees, its weakest link, and how to strengthen it.",
    "balance": "Check that every message is accounted for: applied, waiting, dead or dropped.",
    "trace": "Print what happened to a transaction in all its processes: spans, retries and waits.",
    "inbox": "Inbox tables: create, inspect and purge them.",
    "consumers": "Registered consumers and their contracts.",
    "pause": "Stop a consumer from fetching, in all processes, until you resume it.",
    "resume": "Let a paused consumer continue.",
    "outbox": "Messages that wait to be published: inspect, retry or remove them.",
    "dlq": "Dead letters: inspect, discard or redrive messages that failed permanently.",
    "audit": "Log of what operators did: append-only, each row sealed by a hash in the next.",
    "boundary": "A durable log of facts with named cursors: serve it, append, fetch, confirm.",
    "completion": "Print the script that makes the tab key complete commands and options.",
}
"""Each with the first sentence of its help, so listing them loads nothing."""


_CONSUMERS = "onceward.cli.consumers"
ELSEWHERE = {
    "demo": "onceward.demo.command",
    "relay": "onceward.cli.run",
    "end-worker": "onceward.cli.run",
    "pause": _CONSUMERS,
    "resume": _CONSUMERS,
}
"""Commands that share a module, or are in another room."""


def module_of(command: str) -> str:
    """The module of a command. It has a function or a `Typer` of its name, and may have `<COMMAND>_EXAMPLES`."""
    return ELSEWHERE.get(command, f"onceward.cli.{command}")


class Commands(LazyGroup):
    lazy = COMMANDS


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
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Consume messages so every effect happens once, no matter what crashes, times out or arrives twice."""


def main() -> None:
    """Run the command that the arguments name."""
    prepare()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what cannot be encoded is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except Exception as error:  # noqa: BLE001  the last resort
        from onceward.cli.failure import report

        report(error, as_json="--json" in sys.argv)
