"""How a command ends: its exit codes, and the one line that says what went wrong."""

from __future__ import annotations

import json
from typing import Annotated, NoReturn

import typer

FAILED = 1
MISUSED = 2
"""Wrong arguments, or a database that is not set up."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def fail(text: str, as_json: bool, code: int = FAILED) -> NoReturn:
    """Say what went wrong, and leave."""
    from rich.console import Console

    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"error": text}))
    raise typer.Exit(code)
