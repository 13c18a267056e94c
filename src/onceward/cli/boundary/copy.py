"""`onceward boundary copy`: copy a boundary to another store."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

from onceward._secrets import mask_url
from onceward.cli.boundary.options import handle_errors, name_option
from onceward.cli.exit import MISUSED, AsJson, fail, option
from onceward.cli.output import echo, print_json, progress_bars

if TYPE_CHECKING:
    from onceward.boundary.copy import Copied

STORES = "A directory, postgresql://… or nats://…."


def copy(
    source: Annotated[str, option("STORE", STORES, "--from")],
    target: Annotated[str, option("STORE", STORES, "--to")],
    as_json: AsJson = False,
) -> None:
    """Copy a boundary to another store: objects, facts in order with ids and times, and cursors.

    Stop the server of the source first, so it appends nothing during the copy. The source stays unchanged; repeat a
    copy that was interrupted.

    Exit code: 0; 1 if a store cannot be reached or the target has other facts in it; 2 for wrong arguments.
    """
    if source == target:
        fail("--from and --to are the same store", as_json, MISUSED)
    with handle_errors(as_json, interrupted="repeat it to continue"):
        copied = asyncio.run(_copy(source, target, as_json))
    if as_json:
        print_json(copied)
        return
    echo(
        f"{copied.facts:,} facts, {copied.objects:,} objects and {copied.cursors:,} cursors are now in "
        f"{mask_url(target)}"
    )
    if not copied.same_offsets:
        echo("Expired facts left holes in the source, so offsets are new and cursors were adjusted.")


async def _copy(source: str, target: str, as_json: bool) -> Copied:
    from onceward.boundary.copy import copy as copy_store
    from onceward.boundary.stores import check_exists, open_store

    async with AsyncExitStack() as stores:
        with name_option("--from"):
            check_exists(source)
            old = await open_store(source)
        stores.push_async_callback(old.close)
        with name_option("--to"):
            new = await open_store(target)
        stores.push_async_callback(new.close)
        with progress_bars(as_json, "{task.description}", "{task.completed:,}") as progress:
            bars = {what: progress.add_task(what, total=None) for what in ("objects", "facts")}
            return await copy_store(old, new, lambda what, count: progress.advance(bars[what], count))
