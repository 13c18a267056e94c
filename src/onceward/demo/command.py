"""`onceward demo`: its arguments, its folder, its exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from onceward._files.private import make_directory
from onceward.cli.boundary.options import require_extra
from onceward.cli.exit import flag, option, reason_of
from onceward.cli.output import clean_text
from onceward.demo.setup import Setup
from onceward.errors import OncewardError

DEMO_EXAMPLES = """
Examples:

- `onceward demo` to watch it

- `onceward demo --orders 10000` to watch it longer

- `onceward demo --data ./demo` to inspect logs, ledger and dead letters afterwards

- `onceward demo --json | jq .balance` in scripts
"""


def demo(
    orders: Annotated[int, option("N", "Number of orders.", min=100, max=100_000)] = 2000,
    workers: Annotated[int, option("N", "Number of worker processes.", min=1, max=8)] = 2,
    seed: Annotated[int, option("N", "The same seed makes the same orders.")] = 1,
    data: Annotated[
        Path | None,
        option(
            "DIR",
            "Directory for the stores, the ledger and all logs; it is kept.",
            file_okay=False,
            show_default="a temporary one, deleted at the end",
        ),
    ] = None,
    keep: Annotated[bool, flag("Keep the temporary directory.", "--keep")] = False,
    as_json: Annotated[bool, flag("Print the result as JSON.", "--json")] = False,
) -> None:
    """Produce, consume, crash and balance a few thousand orders.

    A shop sends orders to its boundary. A warehouse forwards them to its own, where two worker processes ship them.
    Some are sent twice, some are refused, some fail or hang before they succeed. The link between the zones is cut for
    a while, one worker is killed with -9 in the middle of a batch, and a dead letter is redriven after its cause is
    fixed. At the end, every order must be shipped once or be a dead letter.

    Exit code: 0 if it balances, 1 if it does not, 2 for wrong arguments or missing packages, 130 after Ctrl-C.
    """
    with require_extra(as_json):
        from onceward.demo import story
        from onceward.demo.crew import ProcessDied
        from onceward.demo.screen import as_dict, open_screen, show
    err = Console(stderr=True)
    try:
        with _interruptible(), _folder(data, keep) as folder:
            setup = Setup(orders=orders, workers=workers, seed=seed, folder=str(folder))
            with open_screen(err) as screen:
                result = story.run_story(setup, screen)
    except (sqlite3.Error, OSError) as error:  # a full disk, a deleted directory
        _fail(err, f"the demo failed: {error}", as_json)
    except (ProcessDied, OncewardError) as error:
        _fail(err, str(error), as_json)
    except Interrupted as error:
        _fail(err, "interrupted; all processes of the demo have ended", as_json, 128 + error.signal)
    kept = folder if folder.exists() else None
    if as_json:
        typer.echo(json.dumps(as_dict(setup, result) | {"data": kept and str(kept)}, indent=2))
    else:
        show(Console(), result)
        if kept is not None:
            typer.echo(f"Kept in {kept}")
    raise typer.Exit(1 if result.problems else 0)


def _fail(err: Console, text: str, as_json: bool, code: int = 1) -> NoReturn:
    err.print(clean_text(text, "red"), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"balanced": False, "problems": [text]}, indent=2))
    raise typer.Exit(code)


@contextmanager
def _folder(named: Path | None, keep: bool) -> Iterator[Path]:
    """The directory of the demo's files: the named one, or a temporary one that is deleted afterwards."""
    if named is not None:
        yield _check_folder(named)
        return
    folder = Path(tempfile.mkdtemp(prefix="onceward-demo-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _check_folder(folder: Path) -> Path:
    """Create it if missing. Refuse it unless empty, because an earlier demo's orders would spoil the balance."""
    try:
        make_directory(folder)
        if any(folder.iterdir()):
            raise typer.BadParameter(f"{folder} is not empty; name a new directory", param_hint="--data")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(
            f"{folder} cannot be used: {reason_of(error)}", param_hint="--data"
        ) from error
    if not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"{folder} is not writable", param_hint="--data")
    return folder.absolute()


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal = signal_number


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise `Interrupted` at the first signal and ignore others, so cleanup is not cut short."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        received.append(number)
        raise Interrupted(number)

    before: dict[int, Any] = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, interrupt)
    try:
        yield
        if received:  # Python ignores what is raised in a callback of the garbage collector, for example
            raise Interrupted(received[0])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
