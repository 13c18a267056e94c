"""How a command ends that failed unexpectedly: in the user's own code, or in ours."""

from __future__ import annotations

import os
import sysconfig
import tempfile
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from onceward._imports import blames_import
from onceward._text import printable_lines
from onceward.cli.exit import fail
from onceward.telemetry.redaction import format_error

OURS = Path(__file__).parents[1]
"""The package."""


def report(error: Exception, as_json: bool) -> NoReturn:
    """Show the traceback of the user's code if that raised the error; otherwise say in one line that we failed."""
    import typer

    try:
        _fail(error, as_json)
    except typer.Exit as ending:
        raise SystemExit(ending.exit_code) from None


def _fail(error: Exception, as_json: bool) -> NoReturn:
    if blames_import(error):
        fail_in_your_code(error, "your code cannot be imported: see above", as_json)
    if (theirs := _first_of_theirs(error.__traceback__)) is not None:
        error.__traceback__ = theirs
        fail_in_your_code(error, "your code failed: see above", as_json)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if Path(each.filename).is_relative_to(OURS)] or list(frames)
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "an unknown place"
    fail(
        f"onceward failed unexpectedly at {place}: {type(error).__name__}: {error}; this is a bug in onceward: please "
        f"report it{_keep(error)}",
        as_json,
    )


def fail_in_your_code(error: BaseException, text: str, as_json: bool) -> NoReturn:
    """Print the traceback of the user's code, and exit."""
    import typer

    typer.echo(printable_lines(format_error(error)), err=True)
    fail(text, as_json)


def _first_of_theirs(trace: TracebackType | None) -> TracebackType | None:
    """The first call in a file that is neither ours nor of Python or an installed package."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values() if path}
    while trace is not None:
        file = os.path.realpath(trace.tb_frame.f_code.co_filename)
        known = (str(OURS), *installed)
        if Path(file).is_file() and not file.startswith(tuple(f"{each}{os.sep}" for each in known)):
            return trace
        trace = trace.tb_next
    return None


def _keep(error: Exception) -> str:
    """Keep the traceback for the report, in a file that only the user can read."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="onceward-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{format_error(error)}\n")
    except OSError:
        return ""
    return f" with the traceback in {name}"
