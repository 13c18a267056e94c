"""What queues and consumers of both modes are put together from."""

from __future__ import annotations

from typing import Self

from onceward._sync import run_blocking
from onceward.queue.claims import Claims
from onceward.queue.config import QueueConfig, check_at_least, check_block_ms
from onceward.queue.core import QueueCore
from onceward.queue.message import BacklogStats
from onceward.queue.redis_side import RedisSide, WireLike
from onceward.queue.stopping import AsyncStop, Stop


class Parts:
    """The parts, and arguments checked and filled in from the configuration."""

    def __init__(self, config: QueueConfig, wire: WireLike, stop: Stop | AsyncStop) -> None:
        self.config = config
        self._wire = wire
        self._stop = stop
        redis_side = RedisSide(config, wire)
        self._core = QueueCore(redis_side)
        self._claims = Claims(redis_side, stop)

    def _block_ms(self, given: int | None) -> int:
        return self.config.block_ms if given is None else check_block_ms(given)

    def _wait_ms(self, given: int | None) -> int:
        return self.config.block_ms if given is None else check_at_least("wait_ms", given, 1)

    def _min_idle_ms(self, given: int | None) -> int:
        return self.config.claim_idle_ms if given is None else check_at_least("min_idle_ms", given, 0)

    def _count(self, given: int) -> int:
        return check_at_least("count", given, 1)


class InThreads(Parts):
    """What a queue and a consumer for threads both have."""

    def backlog_stats(self) -> BacklogStats:
        """Length, pending, oldest idle. One round trip, no side effect, zeros where there is no group."""
        return run_blocking(self._core.backlog_stats())

    def close(self) -> None:
        """Close the connections. Happens by itself when the object is collected."""
        run_blocking(self._wire.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InTasks(Parts):
    """What a queue and a consumer for asyncio both have."""

    async def backlog_stats(self) -> BacklogStats:
        return await self._core.backlog_stats()

    async def close(self) -> None:
        await self._wire.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
