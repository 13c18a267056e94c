"""Removes dedup records whose events can no longer be delivered: in small steps, while consumers run.

First it raises the horizon of each consumer, and commits: from then on, events of an earlier day are refused, whether
or not their record still exists. Then it removes the records. A purge that dies in between loses nothing, and the next
one continues where it ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from math import ceil
from typing import Any, TypeVar

from onceward.db import LockTimeoutError
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.inbox.contract import Contract
from onceward.inbox.errors import UnregisteredConsumerError
from onceward.inbox.ports import InboxPorts
from onceward.inbox.purge.postgresql import DayRemoval
from onceward.inbox.purge.retention import effective_days
from onceward.inbox.purge.sqlite import LOCK_PATIENCE, RowRemoval
from onceward.inbox.purge.steps import Progress, PurgePlan, PurgeReport, Target
from onceward.inbox.registry import Registry
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.partitions import PurgeInProgressError
from onceward.inbox.stores.sqlite import SqliteStore
from onceward.inbox.stores.types import as_date
from onceward.storage.database import check_tables

T = TypeVar("T")

__all__ = ["Purge", "PurgeInProgressError", "PurgeReport"]

_RETENTION = ("retention", "dedup_days", "source_days", "dead_letter_days", "replay_days")


class Purge:
    def __init__(self, store: Store, ports: InboxPorts, registry: Registry) -> None:
        self._store = store
        self._ports = ports
        self._registry = registry

    async def run(self, consumer_id: str | None, progress: Progress = lambda _: None) -> PurgeReport:
        """Purge one consumer, or all registered ones. Calls `progress` after every step with the report so far."""
        report = PurgeReport()
        plan = await self._patiently(self._begin, consumer_id, report)
        if isinstance(self._store, SqliteStore):
            await RowRemoval(self._store, self._ports, report, progress).run(plan)
        else:
            await self._ports.outside(DayRemoval(self._store, plan, report, progress).run)
        return report

    async def _patiently(self, operation: Callable[..., T], *args: Any) -> T:
        until = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                return await self._ports.transact(operation, *args)
            except LockTimeoutError:
                if time.monotonic() > until:
                    raise

    def _begin(self, transaction: DbTransaction, wanted: str | None, report: PurgeReport) -> PurgePlan:
        """PurgePlan what to remove, and raise the horizons. Nothing is removed before this is committed."""
        store = self._store
        check_tables(transaction, store)
        registered = {row["consumer_id"]: str(row["contract"]) for row in store.registrations(transaction)}
        if wanted is not None and wanted not in registered:
            known = ", ".join(registered) or "none"
            raise UnregisteredConsumerError(
                f"consumer {wanted!r} is not registered (registered: {known}), so how long to keep its records is "
                "unknown; nothing was removed"
            )
        plan = PurgePlan(store.today(transaction), [], [])
        horizons = store.horizons(transaction)
        on_hold = {row["consumer_id"] for row in store.holds(transaction) if row["tracking_id"] == ""}
        for consumer_id, contract in registered.items():
            is_wanted = wanted in (None, consumer_id)
            floor = _floor(consumer_id, contract, plan.today, on_hold)
            if isinstance(floor, int):
                target = Target(consumer_id, contract, floor)
                if is_wanted:
                    store.raise_horizon(transaction, consumer_id, floor)
                    plan.targets.append(target)
                    report.floors[consumer_id] = as_date(floor)
                elif consumer_id in horizons:
                    plan.others.append(target._replace(floor_day=min(floor, horizons[consumer_id])))
            elif is_wanted:
                report.skipped[consumer_id] = floor
        return plan

    async def hold(self, consumer_id: str, tracking_id: str | None, reason: str, operator: str) -> bool:
        if not reason.strip() or not operator.strip():
            raise ConfigurationError("a hold needs a reason and the operator's name")
        known = [row["consumer_id"] for row in await self._registry.consumers()]
        if consumer_id not in known:
            raise ConfigurationError(
                f"there is no consumer {consumer_id!r} to hold records of; registered: {', '.join(known) or 'none'}"
            )
        return await self._ports.transact(self._store.hold, consumer_id, tracking_id or "", reason, operator)

    async def release(self, consumer_id: str, tracking_id: str | None) -> bool:
        return await self._ports.transact(self._store.release, consumer_id, tracking_id or "")


def _floor(consumer_id: str, contract: str, today: int, on_hold: set[str]) -> int | str:
    """Return the first day to keep, or the reason to keep everything."""
    if consumer_id in on_hold:
        return "it is on hold"
    try:
        days = effective_days(registered_contract(json.loads(contract)))
    except (ConfigurationError, ValueError, TypeError, KeyError) as error:
        return f"its registered contract is not valid; re-register it: {error}"
    if days is None:
        return "its retention is legal-hold; to release it, register it with another class"
    return today - ceil(days)  # the last event of a day is `days` old only when the whole day is


def registered_contract(fields: dict[str, Any]) -> Contract:
    """Return the contract of a registered row, without its code. Checks it again: the row may have been edited."""
    return Contract(
        consumer_id=fields["consumer_id"],
        event_types=fields["event_types"],
        owner_team=fields["owner_team"],
        idempotency_mechanism=fields["idempotency_mechanism"],
        **{name: fields[name] for name in _RETENTION if name in fields},
    )
