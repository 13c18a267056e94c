"""Removes dedup records whose events can no longer be delivered: in small steps, while consumers run.

First it raises the horizon of each consumer, and commits: from then on, events of an earlier day are refused, whether
or not their record still exists. Then it removes the records. A purge that dies in between loses nothing, and the next
one continues where it ended.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from math import ceil
from typing import Any, TypeVar

from onceward._ids import same_id
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
from onceward.storage import audit
from onceward.storage.database import check_tables
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.inbox"))

T = TypeVar("T")

__all__ = ["Purge", "PurgeInProgressError", "PurgeReport"]

MOST_DAYS = 31
"""Days by which one purge raises the horizon of a consumer, after its first. Monthly purges never need more."""
_RETENTION = ("retention", "dedup_days", "source_days", "dead_letter_days", "replay_days")


class Purge:
    def __init__(self, store: Store, ports: InboxPorts, registry: Registry) -> None:
        self._store = store
        self._ports = ports
        self._registry = registry

    async def run(
        self,
        consumer_id: str | None,
        operator: str,
        reason: str,
        progress: Progress = lambda _: None,
        *,
        trust_clock: bool = False,
    ) -> PurgeReport:
        """Purge one consumer, or all registered ones. Calls `progress` after every step with the report so far.

        The audit gets a row with the new horizons, in their transaction, and one with what was removed. A purge that
        is killed leaves only the first: that it began, and up to which day it may have removed records.
        """
        operator = audit.check_operator(operator)
        reason = audit.check_reason(reason, "purge records")
        report = PurgeReport()
        plan = await self._patiently(self._begin, consumer_id, report, operator, reason, trust_clock)
        try:
            if isinstance(self._store, SqliteStore):
                await RowRemoval(self._store, self._ports, report, progress).run(plan)
            else:
                await self._ports.outside(DayRemoval(self._store, plan, report, progress).run)
        except BaseException as error:
            try:
                await self._note_end(report, operator, f"interrupted by {type(error).__name__}")
            except Exception:  # noqa: BLE001  the error that ended the purge matters more
                _log.warning("could not record in the audit that a purge was interrupted", exc_info=True)
            raise
        await self._note_end(report, operator, "ended")
        return report

    async def _note_end(self, report: PurgeReport, operator: str, ending: str) -> None:
        removed = {name: getattr(report, name) for name in ("rows", "attempts", "effects", "dropped")}
        details = {
            **removed,
            "kept": report.kept,
            "ending": ending,
            "consumers": [*report.floors],
            "unfinished": report.unfinished,
        }
        await self._patiently(audit.note, self._store, operator, "inbox purge ended", details)

    async def _patiently(self, operation: Callable[..., T], *args: Any) -> T:
        until = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                return await self._ports.transact(operation, *args)
            except LockTimeoutError:
                if time.monotonic() > until:
                    raise

    def _begin(
        self,
        transaction: DbTransaction,
        wanted: str | None,
        report: PurgeReport,
        operator: str,
        reason: str,
        trust_clock: bool,
    ) -> PurgePlan:
        """PurgePlan what to remove, and raise the horizons. Nothing is removed before this is committed."""
        store = self._store
        check_tables(transaction, store)
        store.check_clock(transaction, "onceward inbox purge", trust=trust_clock)
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
                if is_wanted and not trust_clock:
                    floor = _bounded(consumer_id, floor, horizons.get(consumer_id), report)
                target = Target(consumer_id, contract, floor)
                if is_wanted:
                    store.raise_horizon(transaction, consumer_id, floor)
                    plan.targets.append(target)
                    report.floors[consumer_id] = as_date(floor)
                elif consumer_id in horizons:
                    plan.others.append(target._replace(floor_day=min(floor, horizons[consumer_id])))
            elif is_wanted:
                report.skipped[consumer_id] = floor
        details = {
            "consumer": wanted,
            "reason": reason,
            "kept_from": report.floors,
            **({"trust_clock": True} if trust_clock else {}),
            "skipped": report.skipped,
        }
        audit.note(transaction, store, operator, "inbox purge", details)
        return plan

    async def hold(self, consumer_id: str, tracking_id: str | None, reason: str, operator: str) -> bool:
        operator, reason = audit.check_operator(operator), audit.check_reason(reason, "hold records")
        known = [row["consumer_id"] for row in await self._registry.consumers()]
        if consumer_id not in known:
            raise ConfigurationError(
                f"there is no consumer {consumer_id!r} to hold records of; registered: {', '.join(known) or 'none'}"
            )
        held = same_id(tracking_id or "")

        def hold(transaction: DbTransaction) -> bool:
            is_new = self._store.hold(transaction, consumer_id, held, reason, operator)
            if is_new:
                self._note(transaction, "inbox hold", consumer_id, held or None, reason, operator)
            return is_new

        return await self._ports.transact(hold)

    async def release(self, consumer_id: str, tracking_id: str | None, reason: str, operator: str) -> bool:
        operator, reason = audit.check_operator(operator), audit.check_reason(reason, "release records")
        held = same_id(tracking_id or "")

        def release(transaction: DbTransaction) -> bool:
            # A migration leaves a hold in another spelling as it was if the event has two.
            ended = [
                self._store.release(transaction, consumer_id, row["tracking_id"])
                for row in self._store.holds(transaction)
                if row["consumer_id"] == consumer_id and same_id(row["tracking_id"]) == held
            ]
            was_held = any(ended)
            if was_held:
                self._note(transaction, "inbox release", consumer_id, held or None, reason, operator)
            return was_held

        return await self._ports.transact(release)

    def _note(
        self,
        transaction: DbTransaction,
        action: str,
        consumer_id: str,
        tracking_id: str | None,
        reason: str,
        operator: str,
    ) -> None:
        """Add a row about one hold. Without a tracking id it is on everything of the consumer."""
        details = {"consumer": consumer_id, "tracking_id": tracking_id, "reason": reason}
        audit.note(transaction, self._store, operator, action, details)


def _bounded(consumer_id: str, floor: int, before: int | None, report: PurgeReport) -> int:
    """Return how far one purge raises the horizon: a mistake, in a clock or a contract, costs a bounded share."""
    if before is None or floor <= before + MOST_DAYS:
        return floor
    report.unfinished.append(
        f"{consumer_id}: one purge raises the horizon by at most {MOST_DAYS} days, to {as_date(before + MOST_DAYS)}; "
        f"records are needed from {as_date(floor)} on. If that is right, purge again, or once with --trust-clock"
    )
    return before + MOST_DAYS


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
