"""Dead letters for asyncio."""

# make faces writes dead_letters.py, with
#   run_blocking: self.operations

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onceward.deadletters.audit import AuditVerdict
from onceward.deadletters.letter import Burial, DeadLetter
from onceward.deadletters.operations import DeadLetterOperations
from onceward.deadletters.ports import AsyncLetterPorts
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive import RATE, Redrive
from onceward.deadletters.root_causes import Rca

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

EVERYTHING = Filter()


class AsyncDeadLetters:
    """One durable place for every message that failed permanently: inspect, discard or redrive it.

    `migrate` makes its tables. Connectors bury here when they are wrapped in `AsyncWithDeadLetters`; your own code
    calls `bury`. `clock` is for SQLite; with PostgreSQL the server's own time counts.
    """

    def __init__(self, engine: AsyncEngine, *, clock: Callable[[], float] = time.time) -> None:
        self.operations = DeadLetterOperations(AsyncLetterPorts(engine), clock)

    async def migrate(self) -> list[str]:
        """Make the tables, or bring them up to date. Returns the names of what was applied."""
        return await self.operations.migrate()

    async def bury(self, *burials: Burial) -> int:
        """Keep these, all or none; durable when this returns: acknowledge afterwards. Burying the same death twice is
        harmless. Returns how many were new."""
        return await self.operations.bury(burials)

    async def find(self, wanted: Filter = EVERYTHING, *, limit: int = 100) -> list[DeadLetter]:
        """Those that fit, in the order in which they first died."""
        return await self.operations.find(wanted, limit)

    async def count(self, wanted: Filter = EVERYTHING) -> int:
        """How many fit."""
        return await self.operations.count(wanted)

    async def body(self, letter_id: int) -> bytes:
        """What was delivered, byte for byte."""
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
        """Have open letters delivered again, `rate` a minute: those of one consumer that a filter names.

        `rca` says why they died and which fix is deployed, or is the number of an open one. With a `redrive_id` of
        yours a second call does nothing. Poison is never redriven. Raises `RedriveRefusedError`, and says what to do.
        """
        return await self.operations.redrive(wanted, rca, rate, operator, redrive_id)

    async def redrives(self, *, limit: int = 20) -> list[dict[str, Any]]:
        """The last redrives: how many wait, succeeded, died again."""
        return await self.operations.redrives(limit)

    async def rcas(self, *, limit: int = 20) -> list[dict[str, Any]]:
        """The last root causes: category, fix, operator, and whether each is open."""
        return await self.operations.rcas(limit)

    async def discard(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """Close open letters without sending them again. They are kept as long as all others."""
        return await self.operations.discard(wanted, reason, operator)

    async def hold(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """Keep these whatever happens, until `release`."""
        return await self.operations.hold(wanted, reason, operator)

    async def release(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """End the hold on these."""
        return await self.operations.release(wanted, reason, operator)

    async def purge(self, *, operator: str) -> int:
        """Remove letters that are resolved or discarded, old enough and not held. Never happens by itself."""
        return await self.operations.purge(operator)

    async def stats(self) -> list[dict[str, Any]]:
        """How many there are, by consumer, type, category and status."""
        return await self.operations.stats()

    async def audit(self, *, limit: int = 100) -> list[dict[str, Any]]:
        """The operators' actions, newest first."""
        return await self.operations.audit(limit)

    async def verify_audit(self) -> AuditVerdict:
        """Whether the audit is what was written."""
        return await self.operations.verify_audit()
