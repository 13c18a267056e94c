"""`onceward outbox`: messages that wait to be published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward._ids import same_id
from onceward._text import quantity
from onceward.cli.database import Database, open_engine
from onceward.cli.dlq.options import Limit, Operator, age, shorten, who
from onceward.cli.exit import MISUSED, AsJson, argument, fail, option
from onceward.cli.output import echo, print_json, print_result, print_table

if TYPE_CHECKING:
    from onceward.outbox.queries import OutboxMessage, OutboxQueries

outbox = typer.Typer(
    no_args_is_help=True, help="Messages that wait to be published: inspect, retry or remove them."
)

DAY = 86400.0


@contextmanager
def _open(url: str, as_json: bool) -> Iterator[OutboxQueries]:
    from onceward.outbox.queries import OutboxQueries

    with open_engine(url, as_json) as engine:
        yield OutboxQueries(engine)


@outbox.command("list")
def list_(
    database: Database,
    state: Annotated[
        str | None,
        option(
            "STATE", "ready, delayed, held, behind, published, dead or moved.", show_default="not published"
        ),
    ] = None,
    target: Annotated[
        str | None, option("TARGET", "As the list shows it: consumer:NAME, producer:NAME, or a URL.")
    ] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List messages, the oldest first.

    Exit code: 0, even if there are none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    from onceward.outbox.queries import STATES

    if state is not None and state not in STATES:
        fail(f"there is no state {state!r}; the states are {', '.join(STATES)}", as_json, MISUSED)
    with _open(database, as_json) as found:
        rows = found.find(state=state, target=target, limit=limit)
        counts = found.counts()
    if as_json:
        print_json(rows)
        return
    columns = {
        "id": "id",
        "target": "target",
        "key": "key",
        "state": "state",
        "attempts": "attempts",
        "age": "age",
        "error": "error",
    }
    empty = "No message waits." if state is None and target is None else "No message matches."
    print_table([_row(each) for each in rows], columns, empty, usual={"key": None, "error": None})
    if counts:
        echo(", ".join(f"{counts[each]:,} {each}" for each in STATES if counts.get(each)))


def _row(message: OutboxMessage) -> dict[str, Any]:
    return {
        "id": message.id,
        "target": message.target,
        "key": message.key,
        "state": message.state,
        "attempts": message.attempts,
        "age": age(message.sent_at),
        "error": None if message.error is None else shorten(message.error, 100),
    }


@outbox.command()
def show(
    id: Annotated[str, argument("ID", "Id of the message.")], database: Database, as_json: AsJson = False
) -> None:
    """Show one message, with its payload.

    Exit code: 0; 1 if there is no such message, or the database fails; 2 for wrong arguments or missing tables.
    """
    with _open(database, as_json) as found:
        id = same_id(id)
        rows = found.find(id=id, limit=1)
        body = found.body(id) if rows else None
    if not rows:
        fail(f"there is no message {id!r} in the outbox; it may have been published and removed", as_json)
    payload = None if body is None else {"payload": body.payload, "metadata": dict(body.metadata)}
    if as_json:
        import msgspec

        print_json({**msgspec.to_builtins(rows[0]), **msgspec.to_builtins(payload or {})})
        return
    import msgspec

    for name, value in msgspec.structs.asdict(rows[0]).items():
        if value is not None:
            echo(f"{name:<10} {value}")
    for name, value in (payload or {}).items():
        echo(f"{name:<10} {msgspec.json.encode(value).decode()}")


@outbox.command()
def retry(
    ids: Annotated[list[str], argument("ID…", "Ids of messages.")],
    database: Database,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Retry messages now whose last send failed. The audit log records it.

    To send a message that became a dead letter, use `onceward dlq redrive --consumer outbox-relay`.

    Exit code: 0; 1 if one of them does not wait after a failure, or the database fails; 2 for wrong arguments or
    missing tables.
    """
    with _open(database, as_json) as found:
        ids = [same_id(each) for each in ids]
        done = found.retry(ids, operator=who(operator))
    print_result({"retried": done}, f"{quantity(len(done), 'message')} will be tried now.", as_json)
    if missing := [each for each in ids if each not in done]:
        fail(f"not waiting after a failure: {', '.join(missing)}; see `onceward outbox show ID`", as_json)


@outbox.command()
def purge(
    database: Database,
    days: Annotated[
        float, option("DAYS", "Remove messages published at least this many days ago.", min=0.0)
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Remove published messages. A relay also does this, after `outbox_retention` seconds.

    Exit code: 0; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with _open(database, as_json) as found:
        removed = found.purge(days * DAY)
    print_result({"removed": removed}, f"{quantity(removed, 'message')} removed.", as_json)
