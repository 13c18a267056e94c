"""The database connections of a process: one engine, and one pool, for all consumers of an app in one mode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceward.app.app import Consumer, Onceward
    from onceward.db.engines import DatabaseTimeouts

AT_ONCE = 16
"""Connections for messages that many consumers have in flight together. A consumer with more concurrency gets more."""
LISTENING = 1
"""Connections on which a relay waits for notifications. For the rest it uses those of `def`."""
SPARE = 2
"""Connections for what is not a message: recording starts, extending leases, redriven letters, the outbox."""


class SharedEngines:
    """Opened for the first that needs it, disposed of after the last."""

    def __init__(self, app: Onceward) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._users: dict[Any, int] = {}
        self._engines: dict[Any, Any] = {}

    def take(self, *, asynchronous: bool) -> Any:
        """Return the engine of this mode; give it back afterwards. In asyncio there is one for each event loop."""
        key = _key(asynchronous)
        with self._lock:
            if key not in self._engines:
                size = pool_sizes(self._app)[asynchronous]
                self._engines[key] = open_engine(self._app, asynchronous=asynchronous, size=size)
            self._users[key] = self._users.get(key, 0) + 1
            return self._engines[key]

    def pools(self) -> list[tuple[str, int, int]]:
        """Of each pool: `threads` or `asyncio`, how many connections are in use, and how many it may open."""
        with self._lock:
            engines = list(self._engines.items())
        if not engines:
            return []
        from sqlalchemy.pool import QueuePool

        pools = [("threads" if key is None else "asyncio", engine.pool) for key, engine in engines]
        return [(mode, pool.checkedout(), pool.size()) for mode, pool in pools if isinstance(pool, QueuePool)]

    def give_back(self) -> None:
        engine = self._let_go(_key(False))
        if engine is not None:
            engine.dispose()

    async def give_back_async(self) -> None:
        engine = self._let_go(_key(True))
        if engine is not None:
            await engine.dispose()

    def _let_go(self, key: Any) -> Any:
        """Return the engine if no other user is left."""
        with self._lock:
            self._users[key] -= 1
            if self._users[key]:
                return None
            del self._users[key]
            return self._engines.pop(key)


def _key(asynchronous: bool) -> Any:
    return asyncio.get_running_loop() if asynchronous else None


def open_engine(app: Onceward, *, asynchronous: bool, size: int | None = None) -> Any:
    """Return an engine on the app's database, with at most `size` connections, or SQLAlchemy's defaults."""
    import sqlalchemy
    from sqlalchemy.pool import QueuePool

    from onceward.app.build import database_url
    from onceward.db.calls import CALLS
    from onceward.db.engines import begin_before_savepoints, connect_arguments, hide_values

    url = database_url(app.database, asynchronous=asynchronous)
    dialect: Any = url.get_dialect()
    arguments = connect_arguments(url, database_timeouts(app), asynchronous=asynchronous)
    options: dict[str, Any] = {"connect_args": arguments}
    if size is not None and issubclass(dialect.get_pool_class(url), QueuePool):  # not in memory
        options |= {"pool_size": size, "max_overflow": 0}
    if asynchronous:
        from sqlalchemy.ext.asyncio import create_async_engine

        async_engine = begin_before_savepoints(hide_values(create_async_engine(url, **options)))
        CALLS.watch(async_engine.sync_engine)
        return async_engine
    engine = begin_before_savepoints(hide_values(sqlalchemy.create_engine(url, **options)))
    CALLS.watch(engine)
    return engine


def database_timeouts(app: Onceward) -> DatabaseTimeouts:
    from onceward.db.engines import DatabaseTimeouts

    return DatabaseTimeouts(app.settings.database_connect_timeout, app.settings.database_silence_timeout)


def pool_sizes(app: Onceward) -> dict[bool, int]:
    """How many connections one process opens at most, for `async def` (True) and for `def` (False).

    A message holds one while its handler runs, and waits for one if all are in use. Without the setting `pool_size`
    there are enough for every message in flight, but for many consumers together no more than `AT_ONCE`. A process
    that runs only some consumers of a run, because one of them crashed, has their share of that.
    """
    together, consumers = _find_consumers(app.run_only, app), _find_consumers(app.only, app)
    wanted = {mode: sum(map(_in_flight, _of(mode, consumers))) for mode in (False, True)}
    total, largest = sum(map(_in_flight, together)), max(map(_in_flight, together), default=0)
    most, spare = min(total, max(largest, AT_ONCE)), SPARE
    modes = [mode for mode in (False, True) if any(_of(mode, consumers))]
    if app.settings.pool_size is not None:
        most, spare = max(app.settings.pool_size - (len(modes) - 1), 1), 0
    sizes = {mode: max(ceil(most * wanted[mode] / total) if total else 0, 1) + spare for mode in modes}
    return {False: 1 + spare, True: 1 + spare} | sizes


def most_connections(app: Onceward) -> int:
    """How many connections `onceward run` opens at most, in all processes."""
    consumers, sizes = _find_consumers(app.only, app), pool_sizes(app)
    modes = [mode for mode in (False, True) if any(_of(mode, consumers))]
    relay = LISTENING + (0 if False in modes else sizes[False]) if app.settings.relay else 0
    pools = sum(sizes[mode] for mode in modes)
    return app.settings.processes * (pools + relay + connections_of_sources(app))


def connections_of_sources(app: Onceward) -> int:
    """How many connections the sources of one process open at most."""
    return sum(each.source.connections for each in _find_consumers(app.only, app))


def _find_consumers(names: Sequence[str], app: Onceward) -> list[Consumer]:
    return [each for each in app.consumers.values() if not names or each.name in names]


def _of(asynchronous: bool, consumers: Any) -> list[Consumer]:
    return [each for each in consumers if each.asynchronous is asynchronous]


def _in_flight(consumer: Consumer) -> int:
    """Messages that hold a connection at once. Without a contract there is no session."""
    return 0 if consumer.contract is None else consumer.policy.loop.concurrency.value
