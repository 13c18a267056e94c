"""Collect the facts to judge a consumer by, from its settings, its source and its database."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from onceward._environment import names_production
from onceward.app.app import Consumer, Onceward, consumers_of
from onceward.app.build import database_url
from onceward.app.engines import most_connections
from onceward.connectors.reports import ServerUnreachable, SourceFacts
from onceward.connectors.urls import Address
from onceward.inbox.commits.group import commit_of
from onceward.inbox.contract import EVERY_TYPE, Contract
from onceward.inbox.purge.retention import effective_days
from onceward.inspection.database_doubts import doubt_postgresql, doubt_sqlite, sqlite_file
from onceward.inspection.guarantees import Facts
from onceward.inspection.probes import accepted_connections, open_database
from onceward.inspection.proofs import problem_of, sampled_types
from onceward.task.guards.receipt import wraps_steps

if TYPE_CHECKING:
    from sqlalchemy import Connection

MOST_NAMED = 3
"""Event types in a headline."""
SQLITE_SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")


def facts_of(app: Onceward, consumer: Consumer) -> Facts:
    found = _read_database_url(app.settings.database)
    unreachable: tuple[str, ...] = ()
    contract = consumer.contract
    try:
        if contract is not None:
            problem = problem_of(app, consumer)
            found |= {"proven": problem is None, "unproven": problem or ""}
            if problem is None and EVERY_TYPE in contract.event_types:
                found |= {"every_type": True, "sampled": _sampled(app, consumer)}
        found |= _ask_database(app.settings.database, consumer)
    except ServerUnreachable as error:
        unreachable = (str(error),)
        if found["database"] == "postgresql":
            unreachable += (f"whether PostgreSQL accepts up to {most_connections(app)} connections",)
    return Facts(
        **found,
        connections=0 if app.settings.database is None else most_connections(app),
        name=_path_of(app, consumer),
        source=_ask_source(consumer.source),
        mode=None if contract is None else contract.mode,
        commit=commit_mode(app, consumer, found.get("database", "")),
        says_contract=consumer.says_contract,
        production=names_production(app.settings.env),
        record_days="" if contract is None else _record_days(contract),
        letter_days=0 if contract is None else contract.dead_letter_days,
        unreachable=unreachable,
    )


def _path_of(app: Onceward, consumer: Consumer) -> str:
    """What to pass to `onceward verify`: a function that is made in another one has no path of its own, and one that is
    two consumers has one for each."""
    function = consumer.function
    module, path = function.__module__, function.__qualname__
    if "<" not in path and len(consumers_of(function)) == 1:
        return f"{module}:{path}"
    there = vars(sys.modules[module]) if module in sys.modules else {}
    names = [name for name, value in there.items() if value is app]
    return f"{module if names else 'MODULE'}:{names[0] if names else 'app'}.consumers.{consumer.name}"


def commit_mode(app: Onceward, consumer: Consumer, database: str) -> str:
    """How the events of a consumer are committed when it runs."""
    if consumer.contract is None or any(map(wraps_steps, app.middleware)):
        return "each"
    return commit_of(consumer, consumer.contract, database)


def _sampled(app: Onceward, consumer: Consumer) -> str:
    """The event types that were verified, for a line of text."""
    types = sampled_types(app, consumer)
    named = [each or "(none)" for each in types[:MOST_NAMED]] + (["…"] if len(types) > MOST_NAMED else [])
    return f"event type{'' if len(types) == 1 else 's'} {', '.join(named)}" if types else ""


def _record_days(contract: Contract) -> str:
    days = effective_days(contract)
    return "until it is released" if days is None else f"for {days:g} days"


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
    if kind != "sqlite":
        return {"database": kind}
    return {
        "database": kind,
        "in_memory": sqlite_file(url) is None,
        "database_doubts": tuple(doubt_sqlite(url)),
    }


def _ask_database(database: str | None, consumer: Consumer) -> dict[str, Any]:
    if database is None:
        return {}
    with open_database(database) as connection:
        if connection is None:  # in memory, or a file that the first run creates, with SQLite's defaults
            return {"has_effects": False}
        one_commit = consumer.contract is not None and consumer.source.joins(connection)
        return {"one_commit": one_commit, **_durability(connection), **_keys(connection, consumer)}


def _durability(connection: Connection) -> dict[str, Any]:
    def ask(query: str) -> Any:
        return connection.exec_driver_sql(query).scalar_one()

    if connection.dialect.name == "sqlite":
        return {"database_synchronous": SQLITE_SYNCHRONOUS[ask("PRAGMA synchronous")]}
    return {
        "database_synchronous": str(ask("SHOW synchronous_commit")).upper(),
        "database_fsync": ask("SHOW fsync") == "on",
        "database_doubts": tuple(doubt_postgresql(connection)),
        "max_connections": accepted_connections(connection),
    }


def _keys(connection: Connection, consumer: Consumer) -> dict[str, Any]:
    """The shortest validity among the last effects of each name, and whether there are any."""
    from sqlalchemy import inspect, text

    if consumer.contract is None or not inspect(connection).has_table("onceward_effects"):
        return {"has_effects": False}
    if "valid_for" not in {each["name"] for each in inspect(connection).get_columns("onceward_effects")}:
        return {}  # the tables are of an older version
    found = list(connection.scalars(text(_LAST_KEYS), {"consumer": consumer.contract.consumer_id}))
    if not found:
        return {"has_effects": False}
    return {} if None in found else {"key_days": min(found) / 86400}


_LAST_KEYS = """
    SELECT e.valid_for FROM onceward_effects e JOIN (
        SELECT name, max(intended_at) AS intended_at FROM onceward_effects WHERE consumer_id = :consumer GROUP BY name
    ) AS last ON last.name = e.name AND last.intended_at = e.intended_at
    WHERE e.consumer_id = :consumer
"""
