"""`onceward consumers`: registered consumers and their contracts; `onceward pause` and `onceward resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward.cli.database import Database, open_engine, open_inbox
from onceward.cli.dlq.options import Operator, who
from onceward.cli.exit import MISUSED, AsJson, argument, fail, option
from onceward.cli.output import echo, for_people, iso_time, print_json, print_table
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.db.transaction import DbTransaction
    from onceward.inbox import Inbox
    from onceward.inbox.evidence.evidence import Evidence
    from onceward.storage.database import Sql

consumers = typer.Typer(no_args_is_help=True, help="Registered consumers and their contracts.")

COLUMNS = {
    "consumer_id": "consumer",
    "owner_team": "team",
    "event_types": "event types",
    "retention": "retention",
    "kept": "kept",
    "mode": "mode",
    "sequencing": "order",
    "updated_at": "registered (UTC)",
    "paused": "paused",
}
USUAL = {"retention": "standard", "sequencing": "none", "paused": ""}


@consumers.command("list")
def list_(database: Database, as_json: AsJson = False) -> None:
    """List the registered consumers, with their teams and how long their records are kept.

    Exit code: 0, even if there are none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with open_inbox(database, as_json) as inbox:
        paused = _paused(inbox)
        found = [_describe(row, paused) for row in inbox.consumers()]
    if as_json:
        print_json(found)
        return
    rows = [
        {
            **each["contract"],
            **each,
            "kept": _format_days(each["kept_days"]),
            "updated_at": for_people(each["updated_at"]),
            "paused": each["paused"] or "",
        }
        for each in found
    ]
    print_table(rows, COLUMNS, "No consumer is registered.", usual=USUAL)


@consumers.command()
def show(
    consumer_id: Annotated[str, argument("CONSUMER", "Consumer id in the registry.")],
    database: Database,
    as_json: AsJson = False,
) -> None:
    """Show the registered contract of one consumer, and the newest evidence in the database.

    Exit code: 0; 1 if the database fails; 2 for a consumer that is not registered, wrong arguments or missing tables.
    """
    with open_inbox(database, as_json) as inbox:
        found = {row["consumer_id"]: row for row in inbox.consumers()}
        paused = _paused(inbox)
        evidence = [_describe_evidence(each) for each in inbox.evidence(consumer_id)[:1]]
    if consumer_id not in found:
        fail(unknown_consumer(consumer_id, list(found)), as_json, MISUSED)
    consumer = {**_describe(found[consumer_id], paused), "evidence": evidence[0] if evidence else None}
    if as_json:
        print_json(consumer)
        return
    fields = {
        **consumer["contract"],
        "kept": _format_days(consumer["kept_days"]),
        "registered_at": consumer["registered_at"],
        "updated_at": consumer["updated_at"],
        "paused": consumer["paused"] or "no",
        "evidence": "{recorded_at}, {result} on {backend}, code {code:.12}".format(**evidence[0])
        if evidence
        else "none in this database",
    }
    rows = [{"field": name, "value": value} for name, value in fields.items()]
    print_table(rows, {"field": "field", "value": "value"}, "")


def unknown_consumer(consumer_id: str, registered: list[str]) -> str:
    return f"consumer {consumer_id!r} is not registered; registered: {', '.join(registered) or 'none'}"


def _paused(inbox: Inbox) -> dict[str, str]:
    """Who paused a consumer and why, by its id."""
    from onceward.failures.board import describe_pause
    from onceward.failures.records import read_state
    from onceward.storage.database import Sql

    rows = Sql(inbox.engine.dialect.name)
    with inbox.engine.connect() as connection:
        paused = read_state(connection, rows).paused
    return {each.consumer_id: describe_pause(each).partition(" is paused ")[2] for each in paused.values()}


def _describe(row: dict[str, Any], paused: dict[str, str]) -> dict[str, Any]:
    return {
        "consumer_id": row["consumer_id"],
        "contract": row["contract"],
        "kept_days": _days(row["contract"]),
        "registered_at": iso_time(row["registered_at"]),
        "updated_at": iso_time(row["updated_at"]),
        "paused": paused.get(row["consumer_id"]),
    }


def _describe_evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "recorded_at": iso_time(evidence.recorded_at),
        "result": evidence.result,
        "backend": evidence.backend,
        "code": evidence.code.digest,
    }


def _days(contract: dict[str, Any]) -> float | str | None:
    """Days that its records are kept; None until released."""
    from onceward.inbox.purge.purge import registered_contract
    from onceward.inbox.purge.retention import effective_days

    try:
        return effective_days(registered_contract(contract))
    except (ConfigurationError, ValueError, TypeError, KeyError):
        return "invalid"


def _format_days(days: float | str | None) -> str:
    if days is None:
        return "until released"
    return days if isinstance(days, str) else f"{days:g} day{'' if days == 1 else 's'}"


# ── pauses ──────────────────────────────────────────────────────────────────────────────────────────────

ConsumerName = Annotated[str, argument("CONSUMER", "Consumer id, or the name of the consumer in its app.")]
Why = Annotated[str, option("TEXT", "Why; shown wherever the pause is, and kept in the audit log.")]

PAUSE_EXAMPLES = """
Examples:

- `onceward pause charge --reason "provider maintenance until 14:00"`

- `onceward resume charge`
"""


def pause(
    consumer: ConsumerName,
    database: Database,
    reason: Why = "",
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Have a consumer fetch nothing, in all processes, until it is resumed.

    Running processes notice within two seconds. What their handlers have begun is finished; what was fetched and not
    begun goes back to the source, and no delivery is counted. The pause is in the database: it survives restarts, and
    can be set while nothing runs.

    Exit code: 0, also if it was paused already; 1 if the database fails; 2 for an unknown consumer, wrong arguments or
    missing tables.
    """
    _set_pause("pause", consumer, database, reason, operator, as_json)


def resume(
    consumer: ConsumerName,
    database: Database,
    reason: Why = "",
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Let a paused consumer go on.

    Exit code: 0, also if it was not paused; 1 if the database fails; 2 for an unknown consumer, wrong arguments or
    missing tables.
    """
    _set_pause("resume", consumer, database, reason, operator, as_json)


def _set_pause(
    action: str, consumer: str, database: str, reason: str, operator: str | None, as_json: bool
) -> None:
    from onceward._sync import run_blocking
    from onceward.failures import records
    from onceward.storage.database import BlockingStoragePorts, Sql

    def change(transaction: DbTransaction, rows: Sql) -> bool:
        do = records.pause if action == "pause" else records.resume
        return do(transaction, rows, consumer, who(operator), reason)

    with open_engine(database, as_json) as engine:
        ports = BlockingStoragePorts(engine)
        changed = run_blocking(ports.transact(change, Sql(ports.dialect.name)))
    if as_json:
        print_json({"consumer": consumer, "paused": action == "pause", "changed": changed})
        return
    text = {
        ("pause", True): "is paused; running processes notice within two seconds",
        ("pause", False): "was paused already",
        ("resume", True): "is resumed",
        ("resume", False): "was not paused",
    }[action, changed]
    echo(f"{consumer} {text}.")
