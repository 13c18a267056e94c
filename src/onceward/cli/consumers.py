"""`onceward consumers`: registered consumers and their contracts; `onceward pause` and `onceward resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from onceward.cli.database import Database, open_engine, open_inbox
from onceward.cli.dlq.options import Operator, who
from onceward.cli.exit import MISUSED, AsJson, argument, fail, option
from onceward.cli.output import echo, for_people, iso_time, print_json, print_table
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.db.transaction import DbTransaction
    from onceward.failures.records import PauseChange
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

    It also lists paused consumers that are not registered, such as those without a contract.

    Exit code: 0, even if there are none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with open_inbox(database, as_json) as inbox:
        found = _known(inbox)
    if as_json:
        print_json(found)
        return
    rows = [
        {
            **dict.fromkeys(COLUMNS),
            **(each["contract"] or {}),
            **each,
            "kept": _format_kept(each),
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

    Exit code: 0; 1 if the database fails; 2 for a consumer that is neither registered nor paused, wrong arguments
    or missing tables.
    """
    with open_inbox(database, as_json) as inbox:
        found = {each["consumer_id"]: each for each in _known(inbox)}
        evidence = [_describe_evidence(each) for each in inbox.evidence(consumer_id)[:1]]
    if consumer_id not in found:
        registered = [name for name, each in found.items() if each["contract"] is not None]
        fail(unknown_consumer(consumer_id, registered), as_json, MISUSED)
    consumer = {**found[consumer_id], "evidence": evidence[0] if evidence else None}
    if as_json:
        print_json(consumer)
        return
    fields = {
        **(consumer["contract"] or {"consumer_id": consumer_id}),
        "kept": _format_kept(consumer),
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


def _known(inbox: Inbox) -> list[dict[str, Any]]:
    """The registered consumers, and the paused ones, which may have no contract."""
    from onceward.failures.board import describe_pauser
    from onceward.failures.records import read_state
    from onceward.storage.database import Sql

    with inbox.engine.connect() as connection:
        state = read_state(connection, Sql(inbox.engine.dialect.name))
    paused: dict[str, dict[str, str]] = {}
    for consumer_id, name in sorted(state.paused):
        paused.setdefault(consumer_id, {})[name] = describe_pauser(state.paused[consumer_id, name])
    registered = {row["consumer_id"]: row for row in inbox.consumers()}
    return [
        {
            "consumer_id": each,
            "contract": row.get("contract"),
            "kept_days": _days(row["contract"]) if row else None,
            "registered_at": iso_time(row.get("registered_at")),
            "updated_at": iso_time(row.get("updated_at")),
            "paused": _join(paused.get(each, {})),
        }
        for each in sorted({*registered, *paused})
        for row in [registered.get(each, {})]
    ]


def _join(pausers: dict[str, str]) -> str | None:
    """Who paused it, by its name in each app; usually there is one."""
    if len(pausers) > 1:
        return "; ".join(f"{name} {who}" for name, who in pausers.items())
    return next(iter(pausers.values()), None)


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


def _format_kept(consumer: dict[str, Any]) -> str | None:
    days: float | str | None = consumer["kept_days"]
    if consumer["contract"] is None:
        return None
    if days is None:
        return "until released"
    return days if isinstance(days, str) else f"{days:g} day{'' if days == 1 else 's'}"


# ── pauses ──────────────────────────────────────────────────────────────────────────────────────────────

ConsumerName = Annotated[str, argument("CONSUMER", "Consumer id, or the name of the consumer in its app.")]
PauseReason = Annotated[str, option("TEXT", "Why; shown wherever the pause is, and kept in the audit log.")]
ResumeReason = Annotated[str, option("TEXT", "Why; kept in the audit log.")]

PAUSE_EXAMPLES = """
Examples:

- `onceward pause charge --reason "provider maintenance until 14:00"`

- `onceward resume charge`
"""


def pause(
    consumer: ConsumerName,
    database: Database,
    reason: PauseReason = "",
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Stop a consumer from fetching, in all processes, until you resume it.

    Running processes notice within two seconds. They finish messages that their handlers have started, and return the
    others to the source without counting a delivery. The pause is in the database: it survives restarts, and you can
    set it while nothing runs, once the consumer has run.

    If it is paused already, your name and `--reason` replace the earlier ones; the audit log keeps both. Without
    `--reason` nothing changes, and the output says who paused it and why.

    Exit code: 0, also if it was paused already; 1 if the database fails; 2 for an unknown consumer, wrong arguments or
    missing tables.
    """
    _set_pause("pause", consumer, database, reason, operator, as_json)


def resume(
    consumer: ConsumerName,
    database: Database,
    reason: ResumeReason = "",
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Let a paused consumer continue.

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

    def change(transaction: DbTransaction, rows: Sql) -> records.PauseChange:
        do = records.pause if action == "pause" else records.resume
        return do(transaction, rows, consumer, who(operator), reason)

    with open_engine(database, as_json) as engine:
        ports = BlockingStoragePorts(engine)
        done = run_blocking(ports.transact(change, Sql(ports.dialect.name)))
    if as_json:
        earlier = [msgspec.to_builtins(each) for each in done.earlier]
        earlier = [{**each, "paused_at": iso_time(each["paused_at"])} for each in earlier]
        paused = action == "pause"
        print_json({"consumer": consumer, "paused": paused, "changed": done.changed, "earlier": earlier})
    elif action == "resume":
        echo(f"{consumer} {'is resumed' if done.changed else 'was not paused'}.")
    else:
        _echo_pause(consumer, done, reason)


def _echo_pause(consumer: str, done: PauseChange, reason: str) -> None:
    from onceward.failures.board import describe_pauser

    if not done.earlier:
        echo(f"{consumer} is paused; running processes notice within two seconds.")
        return
    for each in done.earlier:
        echo(f"{each.name} was paused already, {describe_pauser(each)}")
    if done.changed:
        echo("Your name and reason are stored instead; the audit log keeps both.")
    elif not reason.strip():
        echo("Nothing was changed; give a --reason to replace it.")
