"""What commands share: how they declare options, and how they end, with an exit code and a line that says why."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from logging import Logger
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from onceward.errors import ConfigurationError

_BREAK = re.compile(r"\s*\n\s*")

FAILED = 1
MISUSED = 2
"""Wrong arguments, or a database that is not set up."""
UNKNOWN = 3
"""It could not be determined."""


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
    """Print in one line what went wrong, and exit."""
    from rich.console import Console

    from onceward.cli.output import clean_text
    from onceward.telemetry.redaction import redact

    text = _BREAK.sub(" ", redact(text).strip())
    Console(stderr=True).print(clean_text(text, "red"), soft_wrap=True)
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


@contextmanager
def refuse_path(
    path: str | Path, as_json: bool, *, doing: str = "read", code: int = MISUSED
) -> Iterator[None]:
    """End the command with one line if a file cannot be used, or no file can have this name."""
    try:
        yield
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be {doing}: {reason_of(error)}; name another file", as_json, code)


def is_taken(path: Path) -> bool:
    """Whether something has this name, even a symlink to nowhere. Raises if nothing can have it, unlike `lexists`."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def reason_of(error: OSError | ValueError) -> str:
    """What an operating system says about a file, without the name."""
    words = getattr(error, "strerror", None) or str(error)
    return "embedded null byte" if "embedded null" in words else words  # each Python says it in its own way


def refuse(text: str, form: LogFormat, log: Logger) -> NoReturn:
    """Print or log why the command cannot start, and exit: where logs are JSON, the last line is too."""
    if form is LogFormat.CONSOLE:
        fail(text, as_json=False, code=MISUSED)
    log.critical(text)
    raise typer.Exit(MISUSED)
