"""The operations of a dead-letter store, shared by threads and asyncio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from onceward.connectors.deliveries import Held
from onceward.db.transaction import DbTransaction
from onceward.deadletters import alerts, audit, burial, queries, redrive_leases, root_causes
from onceward.deadletters.audit import AuditVerdict
from onceward.deadletters.letter import Burial, DeadLetter, storable
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive import Redrive, explain_no_match, redrive, redrives
from onceward.deadletters.redrive_leases import Redelivery
from onceward.deadletters.root_causes import Rca
from onceward.errors import ConfigurationError
from onceward.inbox.stores import store_of
from onceward.storage import migrations
from onceward.storage.ports import StoragePorts
from onceward.storage.sql import Sql
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
            await self.ports.transact(migrations.check, self._schema)
            self._checked = True
        return await self.ports.transact(operation, *args)

    async def migrate(self) -> list[str]:
        return await self.ports.transact(migrations.apply, self._schema)

    async def bury(self, burials: Sequence[Burial]) -> int:
        """Store these, all or none, durable when this returns. Return how many deaths were new."""

        def bury(transaction: DbTransaction) -> list[alerts.Buried]:
            new = [each for each in burials if burial.bury(transaction, self._rows, each)]
            return alerts.count_letters(transaction, self._rows, new)

        buried = await self._transact(bury)
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
