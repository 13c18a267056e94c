"""What queues and consumers of both modes are put together from."""

from __future__ import annotations

from onceward.queue.claims import Claims
from onceward.queue.config import QueueConfig, check_at_least, check_block_ms
from onceward.queue.core import QueueCore
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
