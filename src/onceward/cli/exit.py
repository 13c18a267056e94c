"""How a command ends: exit codes, and one line that says what went wrong."""

from __future__ import annotations

import json
from enum import StrEnum
from logging import Logger
from typing import Annotated, NoReturn

import typer

FAILED = 1
MISUSED = 2
"""Wrong arguments, or a database that is not set up."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


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


def refuse(text: str, form: LogFormat, log: Logger) -> NoReturn:
    """Print or log why the command cannot start, and exit: where logs are JSON, the last line is too."""
    if form is LogFormat.CONSOLE:
        fail(text, as_json=False, code=MISUSED)
    log.critical(text)
    raise typer.Exit(MISUSED)
