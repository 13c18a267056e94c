"""`DeadLetters` for threads, `AsyncDeadLetters` for asyncio."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Engine

from onceward._sync import run_blocking
from onceward.deadletters.audit import AuditVerdict
from onceward.deadletters.letter import Burial, DeadLetter
from onceward.deadletters.operations import DeadLetterOperations
from onceward.deadletters.queries import Filter
from onceward.deadletters.redrive import RATE, Redrive
from onceward.deadletters.root_causes import Rca
from onceward.errors import ConfigurationError
from onceward.storage.ports import AsyncStoragePorts, BlockingStoragePorts

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

EVERYTHING = Filter()


def _read_committed(engine: AnyEngine) -> AnyEngine:
    """What waits for a lock has to see what its holder has done, whatever the engine's own isolation."""
    if getattr(engine.dialect, "name", "") != "postgresql":
        return engine
    return engine.execution_options(isolation_level="READ COMMITTED")


class DeadLetters:
    """One durable place for everything that failed for good: kept, seen, mended and sent again.

    `migrate` makes its tables. Connectors bury here when they are wrapped in `WithDeadLetters`; you can with `bury`.
    `clock` is for SQLite; with PostgreSQL the server's own time counts.
    """

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.time) -> None:
        if not isinstance(engine, Engine) or engine.dialect.is_async:
            raise ConfigurationError(
                f"DeadLetters needs an Engine as create_engine makes it, not {engine!r}; an AsyncEngine goes to "
                "AsyncDeadLetters"
            )
        self._core = DeadLetterOperations(BlockingStoragePorts(_read_committed(engine)), clock)

    def migrate(self) -> list[str]:
        """Make the tables, or bring them up to date. Returns the names of what was applied."""
        return run_blocking(self._core.migrate())

    def bury(self, *burials: Burial) -> int:
        """Keep these, all or none; durable when this returns: acknowledge afterwards. To tell the same death twice is
        harmless. Returns how many were new."""
        return run_blocking(self._core.bury(burials))

    def find(self, wanted: Filter = EVERYTHING, *, limit: int = 100) -> list[DeadLetter]:
        """Those that fit, in the order in which they first died."""
        return run_blocking(self._core.find(wanted, limit))

    def count(self, wanted: Filter = EVERYTHING) -> int:
        return run_blocking(self._core.count(wanted))

    def body(self, letter_id: int) -> bytes:
        """What was delivered, byte for byte."""
        return run_blocking(self._core.body(letter_id))

    def redrive(
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
        return run_blocking(self._core.redrive(wanted, rca, rate, operator, redrive_id))

    def redrives(self, *, limit: int = 20) -> list[dict[str, Any]]:
        """The last redrives: how many wait, succeeded, died again."""
        return run_blocking(self._core.redrives(limit))

    def rcas(self, *, limit: int = 20) -> list[dict[str, Any]]:
        return run_blocking(self._core.rcas(limit))

    def discard(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """Close open letters without sending them again. They are kept as long as all others."""
        return run_blocking(self._core.discard(wanted, reason, operator))

    def hold(self, wanted: Filter, *, reason: str, operator: str) -> int:
        """Keep these whatever happens, until `release`."""
        return run_blocking(self._core.hold(wanted, reason, operator))

    def release(self, wanted: Filter, *, reason: str, operator: str) -> int:
        return run_blocking(self._core.release(wanted, reason, operator))

    def purge(self, *, operator: str) -> int:
        """Remove letters that are resolved or discarded, old enough and not held. Never happens by itself."""
        return run_blocking(self._core.purge(operator))

    def stats(self) -> list[dict[str, Any]]:
        """How many there are, by consumer, type, category and status."""
        return run_blocking(self._core.stats())

    def audit(self, *, limit: int = 100) -> list[dict[str, Any]]:
        """What operators did, newest first."""
        return run_blocking(self._core.audit(limit))

    def verify_audit(self) -> AuditVerdict:
        """Whether the audit is what was written."""
        return run_blocking(self._core.verify_audit())


class AsyncDeadLetters:
    """`DeadLetters` for asyncio: the same methods and rules, awaited."""

    def __init__(self, engine: AsyncEngine, *, clock: Callable[[], float] = time.time) -> None:
        if not hasattr(engine, "sync_engine"):
            raise ConfigurationError(
                f"AsyncDeadLetters needs an AsyncEngine as create_async_engine makes it, not {engine!r}; an Engine "
                "goes to DeadLetters"
            )
        self._core = DeadLetterOperations(AsyncStoragePorts(_read_committed(engine)), clock)

    async def migrate(self) -> list[str]:
        return await self._core.migrate()

    async def bury(self, *burials: Burial) -> int:
        return await self._core.bury(burials)

    async def find(self, wanted: Filter = EVERYTHING, *, limit: int = 100) -> list[DeadLetter]:
        return await self._core.find(wanted, limit)

    async def count(self, wanted: Filter = EVERYTHING) -> int:
        return await self._core.count(wanted)

    async def body(self, letter_id: int) -> bytes:
        return await self._core.body(letter_id)

    async def redrive(
        self,
        wanted: Filter,
        *,
        rca: Rca | int,
        operator: str,
        rate: int = RATE,
        redrive_id: str | None = None,
    ) -> Redrive:
        return await self._core.redrive(wanted, rca, rate, operator, redrive_id)

    async def redrives(self, *, limit: int = 20) -> list[dict[str, Any]]:
        return await self._core.redrives(limit)

    async def rcas(self, *, limit: int = 20) -> list[dict[str, Any]]:
        return await self._core.rcas(limit)

    async def discard(self, wanted: Filter, *, reason: str, operator: str) -> int:
        return await self._core.discard(wanted, reason, operator)

    async def hold(self, wanted: Filter, *, reason: str, operator: str) -> int:
        return await self._core.hold(wanted, reason, operator)

    async def release(self, wanted: Filter, *, reason: str, operator: str) -> int:
        return await self._core.release(wanted, reason, operator)

    async def purge(self, *, operator: str) -> int:
        return await self._core.purge(operator)

    async def stats(self) -> list[dict[str, Any]]:
        return await self._core.stats()

    async def audit(self, *, limit: int = 100) -> list[dict[str, Any]]:
        return await self._core.audit(limit)

    async def verify_audit(self) -> AuditVerdict:
        return await self._core.verify_audit()
