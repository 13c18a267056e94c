"""`onceward boundary copy`: copy a boundary to another store."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from onceward.cli.boundary.options import INTERRUPTED, require_extra
from onceward.cli.exit import MISUSED, AsJson, fail
from onceward.cli.output import print_json

if TYPE_CHECKING:
    from onceward.boundary.copy import Copied

STORES = "A directory, postgresql://… or nats://…."


def copy(
    source: Annotated[str, typer.Option("--from", metavar="STORE", help=STORES)],
    target: Annotated[str, typer.Option("--to", metavar="STORE", help=STORES)],
    as_json: AsJson = False,
) -> None:
    """Copy a boundary to another store: objects, facts in order with ids and times, and cursors.

    Stop the server of the source first, so nothing is appended behind the copy. The source stays unchanged; repeat a
    copy that was interrupted.

    Exit code: 0; 1 if a store cannot be reached or the target has other facts in it; 2 for wrong arguments.
    """
    from onceward.errors import ConfigurationError, OncewardError

    if source == target:
        fail("--from and --to are the same store", as_json, MISUSED)
    try:
        with require_extra(as_json):
            copied = asyncio.run(_copy(source, target))
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    except OncewardError as error:
        fail(str(error), as_json)
    except KeyboardInterrupt:
        fail("interrupted; repeat it to continue", as_json, INTERRUPTED)
    if as_json:
        print_json(msgspec.to_builtins(copied))
        return
    typer.echo(
        f"{copied.facts:,} facts, {copied.objects:,} objects and {copied.cursors:,} cursors are now in {target}"
    )
    if not copied.same_offsets:
        typer.echo("Expired facts left holes in the source, so offsets are new and cursors were adjusted.")


async def _copy(source: str, target: str) -> Copied:
    from contextlib import AsyncExitStack

    from rich.console import Console
    from rich.progress import Progress, TextColumn

    from onceward.boundary.copy import copy as copy_store
    from onceward.boundary.stores import check_exists, open_store

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,}"))
    async with AsyncExitStack() as stores:
        with _name_option("--from"):
            check_exists(source)
            old = await open_store(source)
        stores.push_async_callback(old.close)
        with _name_option("--to"):
            new = await open_store(target)
        stores.push_async_callback(new.close)
        with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
            bars = {what: progress.add_task(what, total=None) for what in ("objects", "facts")}
            return await copy_store(old, new, lambda what, count: progress.advance(bars[what], count))


@contextmanager
def _name_option(option: str) -> Iterator[None]:
    """Name the option of the store that an error is about."""
    from onceward.errors import ConfigurationError

    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from None
