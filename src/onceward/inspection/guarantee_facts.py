"""Collect the facts to judge a consumer by, from its settings, its source and its database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onceward.app.app import Consumer, Onceward
from onceward.app.build import database_url, task_class
from onceward.app.engines import most_connections
from onceward.connectors.reports import ServerUnreachable, SourceFacts
from onceward.connectors.urls import Address
from onceward.inbox.evidence.evidence import is_production
from onceward.inspection.guarantees import Facts
from onceward.inspection.probes import accepted_connections, open_database

if TYPE_CHECKING:
    from sqlalchemy import Connection

SQLITE_SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")


def facts_of(app: Onceward, consumer: Consumer) -> Facts:
    found = _read_database_url(app.settings.database)
    unreachable: tuple[str, ...] = ()
    try:
        found |= _ask_database(app.settings.database, consumer)
    except ServerUnreachable as error:
        unreachable = (str(error),)
        if found["database"] == "postgresql":
            unreachable += (f"whether PostgreSQL accepts up to {most_connections(app)} connections",)
    contract = consumer.contract
    return Facts(
        **found,
        connections=0 if app.settings.database is None else most_connections(app),
        name=f"{consumer.function.__module__}:{consumer.function.__qualname__}",
        source=_ask_source(consumer.source),
        mode=None if contract is None else contract.mode,
        production=is_production(app.settings.env),
        unreachable=unreachable,
    )


def _ask_source(source: Address) -> SourceFacts:
    try:
        return source.facts()
    except ServerUnreachable as error:
        return SourceFacts(unreachable=(str(error),))


def _read_database_url(database: str | None) -> dict[str, Any]:
    if database is None:
        return {}
    url = database_url(database, asynchronous=False)
    kind = url.get_backend_name()
    return {"database": kind, "in_memory": kind == "sqlite" and url.database in (None, "", ":memory:")}


def _ask_database(database: str | None, consumer: Consumer) -> dict[str, Any]:
    if database is None:
        return {}
    with open_database(database) as connection:
        if connection is None:  # in memory, or a file that the first run creates, with SQLite's defaults
            return {"proven": _is_proven(consumer, [])}
        return {**_durability(connection), "proven": _is_proven(consumer, _evidence(connection, consumer))}


def _durability(connection: Connection) -> dict[str, Any]:
    def ask(query: str) -> Any:
        return connection.exec_driver_sql(query).scalar_one()

    if connection.dialect.name == "sqlite":
        return {"database_synchronous": SQLITE_SYNCHRONOUS[ask("PRAGMA synchronous")]}
    return {
        "database_synchronous": str(ask("SHOW synchronous_commit")).upper(),
        "database_fsync": ask("SHOW fsync") == "on",
        "max_connections": accepted_connections(connection),
    }


def _evidence(connection: Connection, consumer: Consumer) -> list[Any]:
    """Read the evidence of verifications, newest first."""
    import msgspec
    from sqlalchemy import inspect, text

    from onceward.inbox.evidence.evidence import Evidence

    if consumer.contract is None or not inspect(connection).has_table("onceward_evidence"):
        return []
    query = text(
        "SELECT evidence FROM onceward_evidence WHERE consumer_id = :consumer "
        "ORDER BY recorded_at DESC, evidence_id DESC"
    )
    rows = connection.execute(query, {"consumer": consumer.contract.consumer_id})
    return [msgspec.json.decode(row[0], type=Evidence) for row in rows]


def _is_proven(consumer: Consumer, found: list[Any]) -> bool | None:
    from onceward.inbox.evidence.evidence import lacking

    return (
        None if consumer.contract is None else lacking(consumer.contract, task_class(consumer), found) is None
    )
