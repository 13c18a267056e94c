"""What queues and consumers share, in threads and in asyncio."""

from __future__ import annotations

from onceward._process.stop import AsyncStop, BlockingStop
from onceward._redis.wire import BlockingRedisWire
from onceward._redis.wire_asyncio import AsyncRedisWire
from onceward.queue.claims import Claims
from onceward.queue.config import QueueConfig, check_at_least, check_block_ms
from onceward.queue.protocol import QueueCore, RedisGroup


class QueueParts:
    """The coroutines over one wire; checks arguments, and fills in defaults from the configuration."""

    def __init__(
        self, config: QueueConfig, wire: BlockingRedisWire | AsyncRedisWire, stop: BlockingStop | AsyncStop
    ) -> None:
        self.config = config
        self._wire = wire
        self._stop = stop
        group = RedisGroup(config, wire)
        self._core = QueueCore(group)
        self._claims = Claims(group, stop)

    def _block_ms(self, given: int | None) -> int:
        return self.config.block_ms if given is None else check_block_ms(given)

    def _wait_ms(self, given: int | None) -> int:
        return self.config.block_ms if given is None else check_at_least("wait_ms", given, 1)

    def _min_idle_ms(self, given: int | None) -> int:
        return self.config.claim_idle_ms if given is None else check_at_least("min_idle_ms", given, 0)

    def _count(self, given: int) -> int:
        return check_at_least("count", given, 1)
