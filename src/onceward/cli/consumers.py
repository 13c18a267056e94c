"""`onceward consumers`: who consumes, and under which contract."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from onceward.cli.database import Database, opened
from onceward.cli.exit import MISUSED, AsJson, fail
from onceward.cli.output import for_people, iso_time, print_json, print_table

consumers = typer.Typer(no_args_is_help=True, help="Who consumes, and under which contract.")

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
    """List the consumers that are registered, with who is asked about each and how long its records are kept.

    Exit code: 0, also if there are none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with opened(database, as_json) as inbox:
        found = [_described(row) for row in inbox.consumers()]
    if as_json:
        print_json(found)
        return
    rows = [
        {
            **each["contract"],
            **each,
            "kept": _kept(each["kept_days"]),
            "updated_at": for_people(each["updated_at"]),
        }
        for each in found
    ]
    print_table(rows, COLUMNS, "No consumer is registered.", usual=USUAL)


@consumers.command()
def show(
    consumer_id: Annotated[str, typer.Argument(metavar="CONSUMER", help="Its id in the registry.")],
    database: Database,
    as_json: AsJson = False,
) -> None:
    """Show the whole contract of one consumer, as it is registered.

    Exit code: 0; 1 if the database fails; 2 for a consumer that is not registered, wrong arguments or missing tables.
    """
    with opened(database, as_json) as inbox:
        found = {row["consumer_id"]: row for row in inbox.consumers()}
    if consumer_id not in found:
        fail(unknown(consumer_id, list(found)), as_json, MISUSED)
    described = _described(found[consumer_id])
    if as_json:
        print_json(described)
        return
    fields = {
        **described["contract"],
        "kept": _kept(described["kept_days"]),
        "registered_at": described["registered_at"],
        "updated_at": described["updated_at"],
    }
    rows = [{"field": name, "value": value} for name, value in fields.items()]
    print_table(rows, {"field": "field", "value": "value"}, "")


def unknown(consumer_id: str, registered: list[str]) -> str:
    return f"consumer {consumer_id!r} is not registered; registered: {', '.join(registered) or 'none'}"


def _described(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "consumer_id": row["consumer_id"],
        "contract": row["contract"],
        "kept_days": _days(row["contract"]),
        "registered_at": iso_time(row["registered_at"]),
        "updated_at": iso_time(row["updated_at"]),
    }


def _days(contract: dict[str, Any]) -> float | str | None:
    """How long its records are kept; None: until released."""
    from onceward.errors import ConfigurationError
    from onceward.inbox.purge.purge import registered_contract
    from onceward.inbox.purge.retention import effective_days

    try:
        return effective_days(registered_contract(contract))
    except (ConfigurationError, ValueError, TypeError, KeyError):
        return "invalid"


def _kept(days: float | str | None) -> str:
    if days is None:
        return "until released"
    return days if isinstance(days, str) else f"{days:g} day{'' if days == 1 else 's'}"
