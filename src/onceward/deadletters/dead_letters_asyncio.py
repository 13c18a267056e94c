"""Dead letters for asyncio."""

# make faces writes dead_letters.py, with
#   run_blocking: self.operations

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onceward.deadletters.burial import Burial
from onceward.deadletters.groups import LetterGroup
from onceward.deadletters.letter import DeadLetter
from onceward.deadletters.operations import DeadLetterOperations
from onceward.deadletters.ports import AsyncLetterPorts
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive import RATE, Redrive
from onceward.deadletters.root_causes import Rca
from onceward.storage.audit import AuditVerdict

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onceward.deadletters.dry_run import Prediction

EVERYTHING = Filter()


class AsyncDeadLetters:
    """One durable store for every message that failed permanently: inspect, discard or redrive it.

    `migrate` creates its tables. Connectors wrapped in `AsyncWithDeadLetters` bury here; your own code calls `bury`.
    `clock` is for SQLite; PostgreSQL uses the server's time.
    """

    def __init__(self, engine: AsyncEngine, *, clock: Callable[[], float] | None = None) -> None:
        self.operations = DeadLetterOperations(AsyncLetterPorts(engine), clock)

    async def migrate(self) -> list[str]:
        """Create the tables, or bring them up to date. Return the names of the applied migrations."""
        return await self.operations.migrate()

    async def bury(self, *burials: Burial) -> int:
        """Store these, all or none. They are durable when this returns, so acknowledge afterwards. Burying the same
        death twice is harmless. Return how many were new."""
        return await self.operations.bury(burials)

    async def find(self, wanted: Filter = EVERYTHING, *, limit: int = 100) -> list[DeadLetter]:
        """Return matching letters, in the order in which they first died."""
        return await self.operations.find(wanted, limit)

    async def count(self, wanted: Filter = EVERYTHING) -> int:
        """Count matching letters."""
        return await self.operations.count(wanted)

    async def body(self, letter_id: int) -> bytes:
        """Return the delivered bytes, which no edit changes."""
        return await self.operations.body(letter_id)

    async def edited_body(self, letter_id: int) -> bytes | None:
        """Return the bytes that a redrive delivers instead, if the payload was edited."""
        return await self.operations.edited_body(letter_id)

    async def groups(self, wanted: Filter = EVERYTHING) -> list[LetterGroup]:
        """Group matching letters by consumer, event type, error class and normalized message, the largest first."""
        return await self.operations.groups(wanted)

    async def edit(
        self, letter_id: int, payload: Any, *, task: Any, cause: str, operator: str
    ) -> Prediction | None:
        """Correct the payload of an open letter, for its next redrive. Its body and identity stay.

        `task` is its consumer, of the same mode, with a contract: it first runs in a transaction that is rolled back.
        Returns the prediction of that run. If the payload is the same, changes nothing and returns None. Raises
        `EditRefusedError` if the letter would die again, or was edited or redriven in the meantime.
        """
        return await self.operations.edit(letter_id, payload, task, cause, operator)

    async def redrive(
        self,
        wanted: Filter,
        *,
        rca: Rca | int,
        operator: str,
        rate: int = RATE,
        redrive_id: str | None = None,
        poison_fixed: bool = False,
    ) -> Redrive:
        """Deliver matching open letters of one consumer again, `rate` per minute.

        `rca` says why they died and which fix is deployed, or is the number of an open root cause. With your own
        `redrive_id`, a second call does nothing. Poison is redriven only with `poison_fixed`, when what killed its
        processes is fixed; its starts then count from zero again. Raises `RedriveRefusedError`, which says what to
        do.
        """
        return await self.operations.redrive(wanted, rca, rate, operator, redrive_id, poison_fixed)

    async def stop_redrive(self, redrive_id: str, *, reason: str, operator: str) -> int:
        """Reopen the letters of a redrive that no worker has yet. Return how many; 0 if it was already stopped.

        A letter that is in a handler finishes there; if it goes back, or its worker dies, it is open again, too.
        Raises `RedriveRefusedError` if none of its letters waits.
        """
        return await self.operations.stop_redrive(redrive_id, reason, operator)

    async def redrives(self, *, limit: int = 20) -> list[dict[str, Any]]:
        """Return the last redrives: how many letters wait, succeeded, died again, or were withdrawn by
        stopping it."""
        return await self.operations.redrives(limit)

    async def rcas(self, *, limit: int = 20) -> list[dict[str, Any]]:
        """Return the last root causes: category, fix, operator, and whether each is open."""
        return await self.operations.rcas(limit)

    async def discard(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """Close open letters that are not on hold, without delivering them again. They are kept as long as all others.
        Return how many."""
        return await self.operations.discard(wanted, reason, operator)

    async def hold(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """Prevent discarding and purging these until `release`. A letter on hold gets the new reason. Return how many
        match."""
        return await self.operations.hold(wanted, reason, operator)

    async def release(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """End the hold on these. Return how many were on hold."""
        return await self.operations.release(wanted, reason, operator)

    async def resolve_effect(
        self,
        consumer: str,
        tracking_id: str,
        effect: str,
        *,
        happened: bool,
        result: Any = None,
        reason: str,
        operator: str,
    ) -> None:
        """Record what the provider says about an effect in doubt; then redrive the event.

        If it happened, the handler gets `result` as if the call had returned it. If it did not, the handler makes the
        call with a new key. Raises `ConfigurationError` if the effect is not in doubt, or its event is in flight.
        """
        await self.operations.resolve_effect(
            consumer, tracking_id, effect, happened, result, reason, operator
        )

    async def purge(self, *, operator: str, trust_clock: bool = False) -> int:
        """Remove letters that are resolved or discarded, old enough and not held. Never runs by itself.

        Raises `ClockDoubtError`, and removes nothing, if the clock may be ahead, unless `trust_clock` confirms it.
        """
        return await self.operations.purge(operator, trust_clock=trust_clock)

    async def stats(self) -> list[dict[str, Any]]:
        """Count all letters by consumer, type, category and status."""
        return await self.operations.stats()

    async def audit(self, *, limit: int = 100, before: int | None = None) -> list[dict[str, Any]]:
        """Return the operators' actions, newest first, starting before the entry with the number `before`."""
        return await self.operations.audit(limit, before)

    async def verify_audit(self) -> AuditVerdict:
        """Check that nobody has changed the audit log."""
        return await self.operations.verify_audit()
