"""Dead letters for asyncio."""

# make faces writes dead_letters.py, with
#   run_blocking: self.operations

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onceward.deadletters.audit import AuditVerdict
from onceward.deadletters.burial import Burial
from onceward.deadletters.letter import DeadLetter
from onceward.deadletters.operations import DeadLetterOperations
from onceward.deadletters.ports import AsyncLetterPorts
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive import RATE, Redrive
from onceward.deadletters.root_causes import Rca

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

EVERYTHING = Filter()


class AsyncDeadLetters:
    """One durable store for every message that failed permanently: inspect, discard or redrive it.

    `migrate` creates its tables. Connectors wrapped in `AsyncWithDeadLetters` bury here; your own code calls `bury`.
    `clock` is for SQLite; PostgreSQL uses the server's time.
    """

    def __init__(self, engine: AsyncEngine, *, clock: Callable[[], float] = time.time) -> None:
        self.operations = DeadLetterOperations(AsyncLetterPorts(engine), clock)

    async def migrate(self) -> list[str]:
        """Create the tables, or bring them up to date. Return the names of the applied migrations."""
        return await self.operations.migrate()

    async def bury(self, *burials: Burial) -> int:
        """Store these, all or none, durable when this returns: acknowledge afterwards. Burying the same death twice is
        harmless. Return how many were new."""
        return await self.operations.bury(burials)

    async def find(self, wanted: Filter = EVERYTHING, *, limit: int = 100) -> list[DeadLetter]:
        """Return matching letters, in the order in which they first died."""
        return await self.operations.find(wanted, limit)

    async def count(self, wanted: Filter = EVERYTHING) -> int:
        """Count matching letters."""
        return await self.operations.count(wanted)

    async def body(self, letter_id: int) -> bytes:
        """Return the delivered bytes."""
        return await self.operations.body(letter_id)

    async def redrive(
        self,
        wanted: Filter,
        *,
        rca: Rca | int,
        operator: str,
        rate: int = RATE,
        redrive_id: str | None = None,
    ) -> Redrive:
        """Deliver matching open letters of one consumer again, `rate` per minute.

        `rca` says why they died and which fix is deployed, or is the number of an open one. With your own `redrive_id`
        a second call does nothing. Poison is never redriven. Raises `RedriveRefusedError`, which says what to do.
        """
        return await self.operations.redrive(wanted, rca, rate, operator, redrive_id)

    async def redrives(self, *, limit: int = 20) -> list[dict[str, Any]]:
        """Return the last redrives: how many letters wait, succeeded, died again."""
        return await self.operations.redrives(limit)

    async def rcas(self, *, limit: int = 20) -> list[dict[str, Any]]:
        """Return the last root causes: category, fix, operator, and whether each is open."""
        return await self.operations.rcas(limit)

    async def discard(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """Close open letters without delivering them again. They are kept as long as all others."""
        return await self.operations.discard(wanted, reason, operator)

    async def hold(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """Prevent discarding and purging these until `release`."""
        return await self.operations.hold(wanted, reason, operator)

    async def release(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """End the hold on these."""
        return await self.operations.release(wanted, reason, operator)

    async def purge(self, *, operator: str) -> int:
        """Remove letters that are resolved or discarded, old enough and not held. Never runs by itself."""
        return await self.operations.purge(operator)

    async def stats(self) -> list[dict[str, Any]]:
        """Count all letters by consumer, type, category and status."""
        return await self.operations.stats()

    async def audit(self, *, limit: int = 100) -> list[dict[str, Any]]:
        """Return the operators' actions, newest first."""
        return await self.operations.audit(limit)

    async def verify_audit(self) -> AuditVerdict:
        """Check that the audit is what was written."""
        return await self.operations.verify_audit()
