"""What commands share: how they declare options, and how they end, with an exit code and a line that says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from logging import Logger
from typing import Annotated, Any, NoReturn

import typer

from onceward.errors import ConfigurationError

FAILED = 1
MISUSED = 2
"""Wrong arguments, or a database that is not set up."""


def option(metavar: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, **more)


def flag(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help)


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, **more)


App = Annotated[str, argument("MODULE:APP", "The app, as in shop:app.")]
AsJson = Annotated[bool, flag("Print JSON, for machines.", "--json")]


class LogFormat(StrEnum):
    JSON = "json"
    CONSOLE = "console"


def fail(text: str, as_json: bool, code: int = FAILED) -> NoReturn:
    """Print what went wrong and exit."""
    from rich.console import Console

    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"error": text}))
    raise typer.Exit(code)


@contextmanager
def refuse_mistakes(as_json: bool, *more: type[Exception]) -> Iterator[None]:
    """End the command with one line if it cannot run as it was called and configured."""
    mistakes: tuple[type[Exception], ...] = (ConfigurationError, *more)
    try:
        yield
    except mistakes as error:
        fail(str(error), as_json, MISUSED)


def refuse(text: str, form: LogFormat, log: Logger) -> NoReturn:
    """Print or log why the command cannot start, and exit: where logs are JSON, the last line is too."""
    if form is LogFormat.CONSOLE:
        fail(text, as_json=False, code=MISUSED)
    log.critical(text)
    raise typer.Exit(MISUSED)
