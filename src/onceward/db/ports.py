"""How a session for threads reaches its connection."""

from __future__ import annotations

from sqlalchemy import Engine

from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError


class BlockingSessionPort:
    """One transaction on one connection of the engine."""

    def __init__(self, engine: Engine, session: str) -> None:
        if not isinstance(engine, Engine) or engine.dialect.is_async:
            raise ConfigurationError(
                f"DbSession needs an Engine from create_engine with a synchronous driver, not {engine!r}; "
                "for an AsyncEngine, use AsyncDbSession"
            )
        self._engine = engine
        self.transaction = DbTransaction(engine, session)
        self.run = self.transaction.run
        self.end = self.transaction.end

    def begin(self) -> None:
        with self.transaction.opening():
            self.transaction.begin(self._engine.connect())
