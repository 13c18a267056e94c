"""How a session for threads reaches its connection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine

from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.task.cancellation import Canceller, CancelToken, current_token, raise_if_cancelled
from onceward.task.exceptions import AttemptInterrupted

P = ParamSpec("P")
T = TypeVar("T")


class BlockingSessionPort:
    """One transaction on one connection of the engine.

    If the attempt that opens it runs out of time, the running statement is canceled, and there is no other, and no
    commit.
    """

    def __init__(self, engine: Engine, session: str) -> None:
        if not isinstance(engine, Engine) or engine.dialect.is_async:
            raise ConfigurationError(
                f"DbSession needs an Engine from create_engine with a synchronous driver, not {engine!r}; "
                "for an AsyncEngine, use AsyncDbSession"
            )
        self._engine = engine
        self.transaction = DbTransaction(engine, session)
        self._token: CancelToken | None = None
        self._canceller: Canceller | None = None

    def begin(self) -> None:
        raise_if_cancelled()
        with self.transaction.opening():
            connection = self._engine.connect()
            self._follow_attempt(connection)
            try:
                self.transaction.begin(connection)
            except BaseException:
                self._stop_following()
                raise

    def run(
        self, operation: Callable[Concatenate[DbTransaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if self._token is not None and self._token.expired:
            raise AttemptInterrupted("this attempt ran out of time; its session can only be rolled back")
        return self.transaction.run(operation, *args, **kwargs)

    def end(self, error: BaseException | None) -> None:
        if self._token is None or not self._stop_following() or error is not None:
            self.transaction.end(error)
            return
        late = AttemptInterrupted("this attempt ran out of time; its transaction was rolled back")
        self.transaction.end(late)
        raise late

    def _follow_attempt(self, connection: Connection) -> None:
        self._token = current_token()
        if self._token is not None:
            driver = connection.connection.driver_connection
            self._canceller = self._token.add(partial(self.transaction.backend.cancel, driver))

    def _stop_following(self) -> bool:
        """Whether the attempt was asked to stop. From here on nothing is canceled."""
        if self._token is None or self._canceller is None:
            return False
        self._token.remove(self._canceller)
        if self._canceller.called and self.transaction.backend.cancels_late:
            self.transaction.discards = True
        self._canceller = None
        return self._token.expired
