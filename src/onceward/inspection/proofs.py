"""Which consumers of an app are proven, by the file that its settings name or by its database."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError

from onceward._secrets import mask_url
from onceward.app.app import Consumer, Onceward
from onceward.app.build import database_url, evidence_settings, refusal_without_contract, task_class
from onceward.connectors.reports import ServerUnreachable
from onceward.inbox.evidence.evidence import Evidence
from onceward.inbox.evidence.gate import DENIED, CarriedEvidence
from onceward.inbox.evidence.proof import lacking, refusal
from onceward.inspection.probes import open_database
from onceward.storage.privileges import is_denied

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from onceward.inbox.contract import Contract
    from onceward.inbox.evidence.file import EvidenceSettings

TABLE = "onceward_evidence"
_RECORDED = text(
    "SELECT evidence, recorded_at FROM onceward_evidence WHERE consumer_id = :consumer "
    "ORDER BY recorded_at DESC, evidence_id DESC"
)


def refusals(app: Onceward, consumers: Iterable[Consumer]) -> list[str]:
    """Say of every consumer that production would refuse why, and what to do.

    Consumers whose proof may be in a database that does not answer are not among them: their workers wait for it.
    """
    found = []
    for consumer in consumers:
        contract, problem = consumer.contract, None
        if contract is not None:
            with suppress(ServerUnreachable):
                problem = problem_of(app, consumer)
            found += [] if problem is None else [refusal(contract, task_class(consumer), problem)]
        elif not consumer.says_contract:
            found.append(refusal_without_contract(consumer))
    return found


def problem_of(app: Onceward, consumer: Consumer) -> str | None:
    """Return why a consumer with a contract is not proven, or None if it is. Raises ServerUnreachable."""
    assert consumer.contract is not None
    return missing_proof(evidence_settings(app), consumer.contract, task_class(consumer), app.database)


def missing_proof(settings: EvidenceSettings, contract: Contract, code: Any, database: str) -> str | None:
    """Return why neither the file nor the database proves a consumer. The database needs no tables for that."""
    carried = CarriedEvidence(settings)
    backend = database_url(database, asynchronous=False).get_backend_name()
    problem = carried.lacking(contract, code, backend, None)
    if problem is None and backend == "sqlite":
        return None
    level = None
    try:
        with open_database(database) as connection:
            level = _isolation(connection)
            problem = carried.lacking(contract, code, backend, None, level)
            if problem is None:
                return None
            migrated = connection if connection is not None and inspect(connection).has_table(TABLE) else None
            recorded = [] if migrated is None else _recorded(migrated, contract.consumer_id)
    except ServerUnreachable:
        if problem is None:
            return None  # by what the file says; workers ask for the level when they start
        raise
    if recorded is None:
        return f"{problem}; {DENIED}"
    problem = carried.lacking(contract, code, backend, recorded, level)
    if problem is not None and migrated is None and not settings.given:
        command = f"onceward inbox migrate --database {mask_url(database)}"
        return f"{problem}, which has no tables yet; create them first with `{command}`"
    return problem


def _isolation(connection: Connection | None) -> str | None:
    """The level of the consumer's transactions; None on SQLite, which has one only."""
    if connection is None or connection.dialect.name != "postgresql":
        return None
    level: str = connection.exec_driver_sql("SHOW transaction_isolation").scalar_one()
    return level


def sampled_types(app: Onceward, consumer: Consumer) -> tuple[str, ...]:
    """Return the event types of the samples by which a consumer is proven; none if that was not recorded."""
    contract, code = consumer.contract, task_class(consumer)
    assert contract is not None
    backend = database_url(app.database, asynchronous=False).get_backend_name()
    found = CarriedEvidence(evidence_settings(app)).of(contract.consumer_id)
    with open_database(app.database) as connection:
        if connection is not None and inspect(connection).has_table(TABLE):
            found += _recorded(connection, contract.consumer_id) or []
    proving = (each for each in found if lacking(contract, code, [each], backend) is None)
    return next((each.event_types for each in proving), ())


def _recorded(connection: Connection, consumer_id: str) -> list[Evidence] | None:
    """Read the recorded evidence, newest first; None if the role may not."""
    try:
        rows = connection.execute(_RECORDED, {"consumer": consumer_id})
    except DBAPIError as error:
        if not is_denied(error):
            raise
        return None
    return [
        msgspec.structs.replace(msgspec.json.decode(row.evidence, type=Evidence), recorded_at=row.recorded_at)
        for row in rows
    ]
