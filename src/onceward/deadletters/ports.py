"""How dead letters access their database, in threads and in asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Engine

from onceward.errors import ConfigurationError
from onceward.storage.database import AsyncStoragePorts, BlockingStoragePorts, read_committed

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


class BlockingLetterPorts(BlockingStoragePorts):
    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine) or engine.dialect.is_async:
            raise ConfigurationError(
                f"DeadLetters needs an Engine from create_engine, not {engine!r}; for an AsyncEngine use "
                "AsyncDeadLetters"
            )
        super().__init__(read_committed(engine))


class AsyncLetterPorts(AsyncStoragePorts):
    def __init__(self, engine: AsyncEngine) -> None:
        if not hasattr(engine, "sync_engine"):
            raise ConfigurationError(
                f"AsyncDeadLetters needs an AsyncEngine from create_async_engine, not {engine!r}; for an Engine use "
                "DeadLetters"
            )
        super().__init__(read_committed(engine))
