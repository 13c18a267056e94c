"""`onceward consumers`: registered consumers and their contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward.cli.database import Database, open_inbox
from onceward.cli.exit import MISUSED, AsJson, argument, fail
from onceward.cli.output import for_people, iso_time, print_json, print_table
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.inbox.evidence.evidence import Evidence

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
}
USUAL = {"retention": "standard", "sequencing": "none"}


@consumers.command("list")
def list_(database: Database, as_json: AsJson = False) -> None:
    """List the registered consumers, with their teams and how long their records are kept.

    Exit code: 0, even if there are none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with open_inbox(database, as_json) as inbox:
        found = [_describe(row) for row in inbox.consumers()]
    if as_json:
        print_json(found)
        return
    rows = [
        {
            **each["contract"],
            **each,
            "kept": _format_days(each["kept_days"]),
            "updated_at": for_people(each["updated_at"]),
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
        evidence = [_describe_evidence(each) for each in inbox.evidence(consumer_id)[:1]]
    if consumer_id not in found:
        fail(unknown_consumer(consumer_id, list(found)), as_json, MISUSED)
    consumer = {**_describe(found[consumer_id]), "evidence": evidence[0] if evidence else None}
    if as_json:
        print_json(consumer)
        return
    fields = {
        **consumer["contract"],
        "kept": _format_days(consumer["kept_days"]),
        "registered_at": consumer["registered_at"],
        "updated_at": consumer["updated_at"],
        "evidence": "{recorded_at}, {result} on {backend}, code {code:.12}".format(**evidence[0])
        if evidence
        else "none in this database",
    }
    rows = [{"field": name, "value": value} for name, value in fields.items()]
    print_table(rows, {"field": "field", "value": "value"}, "")


def unknown_consumer(consumer_id: str, registered: list[str]) -> str:
    return f"consumer {consumer_id!r} is not registered; registered: {', '.join(registered) or 'none'}"


def _describe(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "consumer_id": row["consumer_id"],
        "contract": row["contract"],
        "kept_days": _days(row["contract"]),
        "registered_at": iso_time(row["registered_at"]),
        "updated_at": iso_time(row["updated_at"]),
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
