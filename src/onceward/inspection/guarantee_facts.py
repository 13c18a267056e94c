"""What is to be known of a consumer before it is judged: from its settings, and from the servers themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onceward.app.app import Consumer, Onceward
from onceward.app.build import database_url, task_class
from onceward.connectors.urls import Address, stream_of
from onceward.inbox.evidence.evidence import is_production
from onceward.inspection.guarantees import Facts
from onceward.inspection.probes import ServerUnreachable, ask_boundary, asking_database, asking_redis

if TYPE_CHECKING:
    from sqlalchemy import Connection

SQLITE_SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")


def facts_of(app: Onceward, consumer: Consumer) -> Facts:
    found = {**_said_of_source(consumer.source), **_said_of_database(app.settings.database)}
    unreachable: list[str] = []
    for look in (_look_at_source, _look_at_database):
        try:
            found |= look(app, consumer)
        except ServerUnreachable as error:
            unreachable.append(str(error))
    contract = consumer.contract
    return Facts(
        **found,
        name=f"{consumer.function.__module__}:{consumer.function.__qualname__}",
        mode=None if contract is None else contract.mode,
        production=is_production(app.settings.env),
        unreachable=tuple(unreachable),
    )


# ── what is said ────────────────────────────────────────────────────────────────────────────────────────


def _said_of_source(source: Address) -> dict[str, Any]:
    return {
        "source": source.kind,
        "synchronous": source.settings.get("synchronous", "FULL"),
        "maxlen": source.settings.get("maxlen"),
    }


def _said_of_database(database: str | None) -> dict[str, Any]:
    if database is None:
        return {}
    url = database_url(database, asynchronous=False)
    kind = url.get_backend_name()
    return {"database": kind, "in_memory": kind == "sqlite" and url.database in (None, "", ":memory:")}


# ── what servers say ────────────────────────────────────────────────────────────────────────────────────


def _look_at_source(app: Onceward, consumer: Consumer) -> dict[str, Any]:
    if consumer.source.kind == "redis":
        return _redis(consumer.source)
    if consumer.source.kind == "boundary":
        ask_boundary(consumer.source)
    return {}


def _redis(source: Address) -> dict[str, Any]:
    from redis.exceptions import ResponseError

    server, _ = stream_of(source)
    with asking_redis(server) as redis:
        info = redis.info()
        try:
            fsync = redis.config_get("appendfsync").get("appendfsync")
        except ResponseError:  # servers of providers do not tell
            fsync = None
    return {
        "redis_version": info["redis_version"],
        "aof": bool(info.get("aof_enabled")),
        "fsync": fsync,
        "eviction": info.get("maxmemory_policy"),
        "replicas": info.get("connected_slaves"),
    }


def _look_at_database(app: Onceward, consumer: Consumer) -> dict[str, Any]:
    if app.settings.database is None:
        return {}
    with asking_database(app.settings.database) as connection:
        if (
            connection is None
        ):  # in memory, or a file that the first run makes, with what SQLite does by itself
            return {"proven": _proven(consumer, [])}
        return {**_durability(connection), "proven": _proven(consumer, _evidence(connection, consumer))}


def _durability(connection: Connection) -> dict[str, Any]:
    def ask(query: str) -> Any:
        return connection.exec_driver_sql(query).scalar_one()

    if connection.dialect.name == "sqlite":
        return {"database_synchronous": SQLITE_SYNCHRONOUS[ask("PRAGMA synchronous")]}
    return {
        "database_synchronous": str(ask("SHOW synchronous_commit")).upper(),
        "database_fsync": ask("SHOW fsync") == "on",
    }


def _evidence(connection: Connection, consumer: Consumer) -> list[Any]:
    """Of verifications, newest first."""
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


def _proven(consumer: Consumer, found: list[Any]) -> bool | None:
    from onceward.inbox.evidence.evidence import lacking

    return (
        None if consumer.contract is None else lacking(consumer.contract, task_class(consumer), found) is None
    )
