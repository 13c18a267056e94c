"""`postgresql://user@host/database/orders`: a queue in a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onceward.connectors.postgresql.address import (
    CONNECTION_SETTINGS,
    check,
    connection_of,
    identity_of,
    parts_of,
)
from onceward.connectors.reports import SourceBacklog, SourceCounts, SourceFacts
from onceward.connectors.scheme import LEASE_SETTINGS, Scheme, Setting, required_package

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from onceward.connectors.urls import Address


def open_queue(address: Address, *, asynchronous: bool) -> Any:
    with required_package("psycopg", "postgres"):
        from onceward.connectors.postgresql.connector import AsyncPostgreSqlConnector, PostgreSqlConnector

    kind: Any = AsyncPostgreSqlConnector if asynchronous else PostgreSqlConnector
    _, queue = parts_of(address)
    rules = {name: value for name, value in address.settings.items() if name in LEASE_SETTINGS}
    return kind(connection_of(address), queue, **rules)


def facts(address: Address) -> SourceFacts:
    from onceward.connectors.postgresql.counts import describe_server

    return describe_server(address)


def counts(address: Address) -> SourceCounts:
    from onceward.connectors.postgresql.counts import count_queue

    return count_queue(address)


def backlog(address: Address) -> SourceBacklog:
    from onceward.connectors.postgresql.counts import read_backlog

    return read_backlog(address)


def joins(address: Address, connection: Connection) -> bool:
    from onceward.connectors.postgresql.counts import is_in_database_of

    return is_in_database_of(address, connection)


SCHEME = Scheme(
    names=("postgresql", "postgres"),
    keeps_order=True,
    settings={**LEASE_SETTINGS, "queue": Setting(), **dict.fromkeys(CONNECTION_SETTINGS, Setting())},
    check=check,
    identity=identity_of,
    open=open_queue,
    facts=facts,
    counts=counts,
    backlog=backlog,
    joins=joins,
    connections=5,
)
