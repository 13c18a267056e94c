"""The operations of a dead-letter store, shared by threads and asyncio, and how a letter gets into it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from onceward.connectors.lease_rules import Failure
from onceward.connectors.leases import Held
from onceward.db.transaction import DbTransaction
from onceward.deadletters import alerts, audit, queries, redrive_leases, root_causes
from onceward.deadletters.audit import AuditVerdict
from onceward.deadletters.burial import Burial, storable
from onceward.deadletters.letter import KEPT_SECONDS, DeadLetter, decode_history
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive import Redrive, explain_no_match, redrive, redrives
from onceward.deadletters.redrive_leases import Redelivery
from onceward.deadletters.root_causes import Rca
from onceward.errors import ConfigurationError
from onceward.inbox.stores import store_of
from onceward.storage import migrations
from onceward.storage.database import Sql, StoragePorts, check_tables
from onceward.transaction import Settlement, Verdict

PURGE_STEP = 1000

T = TypeVar("T")


class DeadLetterOperations:
    """Runs each operation in one transaction. With blocking ports the coroutines never suspend (`onceward._sync`)."""

    def __init__(self, ports: StoragePorts, clock: Callable[[], float]) -> None:
        self.ports = ports
        self._schema = store_of(ports.dialect, clock)
        self._rows = Sql(ports.dialect.name, clock)
        self._alerts = alerts.Alerts()
        self._checked = False
        self.owner: str | None = None
        """The process that the leases of redriven letters belong to."""

    async def _transact(self, operation: Callable[..., T], *args: Any) -> T:
        if not self._checked:  # its error says how to create missing tables
            await self.ports.transact(check_tables, self._schema)
            self._checked = True
        return await self.ports.transact(operation, *args)

    async def migrate(self) -> list[str]:
        return await self.ports.transact(migrations.apply, self._schema)

    async def bury(self, burials: Sequence[Burial]) -> int:
        """Store these, all or none, durable when this returns. Return how many deaths were new."""
        buried = await self._transact(bury, self._rows, burials)
        self._alerts.send(buried)
        return len(buried)

    async def find(self, wanted: Filter, limit: int, after: int = 0) -> list[DeadLetter]:
        return await self._transact(queries.find, self._rows, wanted, limit, after)

    async def count(self, wanted: Filter) -> int:
        return await self._transact(queries.count, self._rows, wanted)

    async def body(self, letter_id: int) -> bytes:
        body = await self._transact(queries.body, self._rows, letter_id)
        if body is None:
            raise ConfigurationError(f"there is no dead letter {letter_id}; list them with find()")
        return body

    async def event_at(self, letter_id: int) -> float | None:
        return await self._transact(queries.event_at, self._rows, letter_id)

    async def redrive(
        self, wanted: Filter, rca: Rca | int, rate: int, operator: str, redrive_id: str | None
    ) -> Redrive:
        return await self._transact(redrive, self._rows, wanted, rca, rate, operator, redrive_id)

    async def explain_no_match(self, wanted: Filter) -> str:
        return await self._transact(explain_no_match, self._rows, wanted)

    async def redrives(self, limit: int) -> list[dict[str, Any]]:
        return await self._transact(redrives, self._rows, limit)

    async def rcas(self, limit: int) -> list[dict[str, Any]]:
        return await self._transact(root_causes.last, self._rows, limit)

    async def discard(self, wanted: Filter, reason: str, operator: str) -> int:
        return await self._run_with_audit(operator, "discard", wanted, reason, queries.discard, wanted)

    async def hold(self, wanted: Filter, reason: str, operator: str) -> int:
        return await self._run_with_audit(
            operator, "hold", wanted, reason, queries.set_hold, wanted, storable(reason or "")
        )

    async def release(self, wanted: Filter, reason: str, operator: str) -> int:
        return await self._run_with_audit(operator, "release", wanted, reason, queries.set_hold, wanted, None)

    async def _run_with_audit(
        self,
        operator: str,
        action: str,
        wanted: Filter,
        reason: str,
        operation: Callable[..., int],
        *args: Any,
    ) -> int:
        audit.check_operator(operator)
        if not reason or not reason.strip():
            raise ConfigurationError(f"give a reason to {action} dead letters")
        if not wanted.as_dict():
            raise ConfigurationError(f"give a filter to {action} dead letters: ids, a type, a consumer …")

        def do(transaction: DbTransaction) -> int:
            letters = operation(transaction, self._rows, *args)
            details = {"filter": wanted.as_dict(), "reason": reason, "letters": letters}
            audit.note(transaction, self._rows, operator, action, details)
            return letters

        return await self._transact(do)

    async def purge(self, operator: str) -> int:
        """Remove settled letters that need not be kept any longer, in small steps, each with its line in the audit.

        Return how many.
        """
        audit.check_operator(operator)

        def step(transaction: DbTransaction) -> int:
            removed = queries.purge(transaction, self._rows, PURGE_STEP)
            if removed or not total:
                audit.note(transaction, self._rows, operator, "purge", {"letters": removed})
            return removed

        total = 0
        while removed := await self._transact(step):
            total += removed
        return total

    async def stats(self) -> list[dict[str, Any]]:
        return await self._transact(queries.stats, self._rows)

    async def note(self, operator: str, action: str, details: dict[str, Any]) -> None:
        """Add a line to the audit about an action that changes nothing here."""
        await self._transact(audit.note, self._rows, operator, action, details)

    async def audit(self, limit: int) -> list[dict[str, Any]]:
        return await self._transact(audit.entries, self._rows, limit)

    async def verify_audit(self) -> AuditVerdict:
        return await self._transact(audit.verify, self._rows)

    # ── redelivery, for `WithDeadLetters` ───────────────────────────────────────────────────────────────

    async def deliver(self, consumer: str, size: int, lease: float) -> list[Redelivery]:
        """Lease the redriven letters that are due."""
        delivered, deaths = await self._transact(
            redrive_leases.deliver, self._rows, consumer, size, lease, self.owner
        )
        for message_id, outcome, error in deaths:
            alerts.report_redriven(consumer, message_id, outcome, error)
        return delivered

    async def settle(self, consumer: str, endings: Sequence[tuple[Held, Settlement]]) -> list[Held]:
        """End these deliveries, all or none. Return those whose lease was lost."""
        settled = await self._transact(redrive_leases.settle, self._rows, endings)
        lost = []
        for message_id, (held, settlement) in zip(settled, endings, strict=True):
            if message_id is None:
                lost.append(held)
            elif settlement.verdict != Verdict.RETURNED:
                outcome = "succeeded" if settlement.verdict == Verdict.DONE else "died_again"
                error = "" if settlement.error is None else str(settlement.error)
                alerts.report_redriven(consumer, message_id, outcome, error)
        return lost

    async def extend(self, deliveries: Sequence[Held], lease: float) -> list[Held]:
        """Keep these for another lease. Return those whose lease was lost."""
        return await self._transact(redrive_leases.extend, self._rows, deliveries, lease)


def bury(transaction: DbTransaction, rows: Sql, burials: Sequence[Burial]) -> list[alerts.Buried]:
    """Store these. Return the new ones and, once per kind, how many letters are like them: all of a kind have the same
    numbers."""
    buried: list[alerts.Buried] = []
    seen: set[tuple[str, str, str | None]] = set()
    for burial in list(filter(partial(_bury, transaction, rows), burials)):
        kind = (burial.consumer, burial.event_type, burial.aggregate_id)
        counts = None
        if kind not in seen:
            counts = rows.run(
                transaction,
                _COUNTS,
                consumer=burial.consumer,
                event_type=burial.event_type,
                aggregate=burial.aggregate_id,
                recent=alerts.SURGE_SECONDS,
                baseline=alerts.BASELINE_SECONDS,
            )
        buried.append((burial, None if counts is None else counts.mappings().one()))
        seen.add(kind)
    return buried


def _bury(transaction: DbTransaction, rows: Sql, burial: Burial) -> bool:
    """Store it. Return False, and change nothing, if this death was reported before.

    The lines of its history identify a death. A process that is killed between burying a message and acknowledging
    it reports it again, perhaps after the letter was redriven and resolved: that must not reopen it.
    """
    history = burial.history
    if not history:
        history = (Failure(rows.timestamp(transaction), burial.error, burial.attempts),)
    values = {
        "category": str(burial.category),
        "reason": burial.reason,
        "error": burial.error,
        "kept": KEPT_SECONDS,
    }
    identity = {
        "consumer": burial.consumer,
        "message_id": burial.message_id,
        "digest": hashlib.sha256(burial.body).digest(),
    }
    new = {
        **values,
        **identity,
        "origin": burial.origin,
        "event_type": burial.event_type,
        "aggregate_id": burial.aggregate_id,
        "sequence": burial.sequence,
        "event_at": burial.event_at,
        "attempts": burial.attempts,
        "history": msgspec.json.encode(history).decode(),
        "body": burial.body,
        "trace_id": burial.trace_id,
        "first": burial.first_failed_at,
    }
    before = None
    while before is None:  # a purge may remove it between the two
        if rows.run(transaction, _BURY, **new).rowcount == 1:
            return True
        before = rows.first(transaction, _FIND + rows.for_update, **identity)
    return _bury_again(transaction, rows, burial, before, history, values)


def _bury_again(
    transaction: DbTransaction,
    rows: Sql,
    burial: Burial,
    before: dict[str, Any],
    history: tuple[Failure, ...],
    values: dict[str, Any],
) -> bool:
    is_settled = before["status"] in ("resolved", "discarded")
    if not burial.history and not is_settled:
        return False  # nothing distinguishes it from the known death
    known = decode_history(before["history"])
    fresh = tuple(each for each in history if each not in known)
    if not fresh:
        return False
    rows.run(
        transaction,
        _BURY_AGAIN,
        id=before["id"],
        status="open" if is_settled else before["status"],
        history=msgspec.json.encode((*known, *fresh)).decode(),
        attempts=burial.attempts if len(fresh) == len(history) else len(fresh),
        **values,
    )
    if is_settled:
        root_causes.reopen(transaction, rows, before["id"])
    return True


_BURY = """
    INSERT INTO onceward_dead_letters (
        consumer, message_id, origin, event_type, aggregate_id, sequence, event_at, category, reason, error, attempts,
        history, body, body_sha256, trace_id, first_failed_at, died_at, keep_until)
    VALUES (
        :consumer, :message_id, :origin, :event_type, :aggregate_id, :sequence, :event_at, :category, :reason, :error,
        :attempts, :history, :body, :digest, :trace_id, coalesce(CAST(:first AS double precision), {now}),
        {now}, {now} + :kept)
    ON CONFLICT (consumer, message_id, body_sha256) DO NOTHING
"""
_FIND = """
    SELECT id, status, history FROM onceward_dead_letters
    WHERE consumer = :consumer AND message_id = :message_id AND body_sha256 = :digest
"""
# A letter that waits for its redrive, or is being redriven, stays in it: the copy that died was another one.
_BURY_AGAIN = """
    UPDATE onceward_dead_letters SET
        status = :status, category = :category, reason = :reason, error = :error, attempts = attempts + :attempts,
        deaths = deaths + 1, history = :history, died_at = {now}, keep_until = {now} + :kept, settled_at = NULL
    WHERE id = :id
"""
_COUNTS = """
    SELECT
        {now} AS at,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE status = 'open' AND consumer = :consumer AND event_type = :event_type) AS of_type,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE consumer = :consumer AND died_at > {now} - :recent) AS recent,
        (SELECT count(*) FROM onceward_dead_letters
            WHERE consumer = :consumer AND died_at <= {now} - :recent AND died_at > {now} - :baseline) AS before,
        (SELECT count(*) FROM onceward_dead_letters WHERE status = 'open' AND consumer = :consumer
            AND aggregate_id = :aggregate) AS of_aggregate
"""
