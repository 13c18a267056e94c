"""`onceward boundary skip`: inspect the fact that a link is stopped at, and continue without it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from onceward._secrets import mask_url
from onceward.cli.boundary.forward import Source
from onceward.cli.boundary.options import Consumer, connect, name_option
from onceward.cli.dlq.options import Operator, who
from onceward.cli.exit import MISUSED, AsJson, fail, option
from onceward.cli.output import echo, print_json, print_table

if TYPE_CHECKING:
    from onceward.boundary import AsyncBoundaryClient, StoredFact


def skip(
    source: Source,
    consumer: Consumer,
    offset: Annotated[int | None, option("N", "Offset at the source; must be the link's next fact.")] = None,
    reason: Annotated[str | None, option("TEXT", "Why it may be skipped.")] = None,
    here: Annotated[
        str | None, option("STORE", "Store of the receiving side, to show what it has instead.", "--to")
    ] = None,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Show the fact that a link is stopped at; with an offset and a reason, continue without it.

    Facts never change: either you skip the fact permanently, or the link stays where it is. The link continues by
    itself. The command stores the operator and the reason at the source, as an object whose name it prints, and the
    link logs them. `--to` only reads, and works while a server is running.

    Exit code: 0; 1 if nothing is waiting, another fact is next, or the boundary refuses or cannot be reached; 2 for
    wrong arguments.
    """
    if (offset is None) != (reason is None):
        fail("--offset and --reason go together; omit both to only show the fact", as_json, MISUSED)
    if reason is not None and not reason.strip():
        fail("--reason is empty; say why this fact may be skipped", as_json, MISUSED)
    with connect(source, as_json, "--from") as (client, runner):
        theirs = runner.run(_next(client, consumer, as_json))
        ours = None if here is None else _find(here, theirs.message_id)
        if offset is not None and offset != theirs.offset:
            fail(
                f"the next fact of {consumer} is at offset {theirs.offset}, not {offset}; only that one can be skipped",
                as_json,
            )
        kept = None
        if reason is not None:
            from onceward.boundary.links import skips

            runner.run(skips.skip(client, consumer, theirs, reason=reason.strip(), operator=who(operator)))
            kept = f"{skips.BUCKET} {skips.key_of(consumer, theirs.offset)}"
    decision = {
        "consumer": consumer,
        "offset": theirs.offset,
        "skipped": kept is not None,
        "reason": reason,
        "kept_as": kept,
    }
    sides = {"source": _fields(theirs), "here": None if ours is None else _fields(ours)}
    if as_json:
        print_json({**decision, **sides})
        return
    _print_sides(sides["source"] or {}, sides["here"], here)
    if kept is not None:
        echo(f"Skipped: {consumer} continues after offset {offset}. Reason: {reason}")
        echo(f"Read it again: `onceward boundary get {kept} - --url {mask_url(source)}`")
    else:
        echo(f"Nothing was changed. To skip it, repeat this with --offset {theirs.offset} --reason TEXT.")


async def _next(client: AsyncBoundaryClient, consumer: str, as_json: bool) -> StoredFact:
    # It moves nothing, but refuses a misspelled name, which a fetch would register.
    await client.confirm(consumer, 0)
    page = await client.fetch(consumer, 1)
    if not page.facts:
        fail(f"nothing is waiting for {consumer}, so there is nothing to skip", as_json)
    return page.facts[0]


def _find(store: str, message_id: str) -> StoredFact | None:
    """The fact with this id on the receiving side. Scans the log, which takes seconds and happens rarely."""
    from onceward.boundary.stores.read_only import open_reader
    from onceward.boundary.wire import stored

    async def find() -> StoredFact | None:
        at, wanted = 0, message_id.encode()
        async with open_reader(store) as look:
            while records := await look.read(at, 1000):
                for record in records:
                    if wanted in record[1] and (fact := stored(record)).message_id == message_id:
                        return fact
                at = records[-1][0]
        return None

    with name_option("--to"):
        return asyncio.run(find())


def _fields(fact: StoredFact) -> dict[str, Any]:
    """The fields that make two facts equal, and the offset."""
    from onceward.boundary.canonical import content_digest

    return {
        "offset": fact.offset,
        "message_id": fact.message_id,
        "subject": fact.fact.subject,
        "predicate": fact.fact.predicate,
        "object_json": fact.fact.object_json,
        "object_media_type": fact.envelope.object_media_type,
        "object_schema": fact.envelope.object_schema,
        "from_zone": fact.envelope.from_zone,
        "to_zone": fact.envelope.to_zone,
        "digest": content_digest(fact.envelope, fact.fact).hex(),
    }


def _print_sides(theirs: dict[str, Any], ours: dict[str, Any] | None, here: str | None) -> None:
    if ours is None:
        if here is not None:
            echo(f"{mask_url(here)} has no fact with this id.")
        rows = [{"field": key, "source": str(value)} for key, value in theirs.items()]
        print_table(rows, {"field": "", "source": "source"}, "")
        return
    rows = [
        {
            "field": key,
            "source": str(value),
            "here": str(ours[key]),
            "differs": "≠" if key != "offset" and value != ours[key] else "",
        }
        for key, value in theirs.items()
    ]
    print_table(rows, {"field": "", "source": "source", "differs": "", "here": "here"}, "")
