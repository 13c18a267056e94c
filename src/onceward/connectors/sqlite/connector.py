"""The connector for threads, and the one for asyncio, which runs the same code on its own thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Unpack

from onceward.connectors.background import BackgroundConnector
from onceward.connectors.lease_rules import LeaseRules, LeaseSettings
from onceward.connectors.leases import WRITE_WAIT, LeasingConnector
from onceward.connectors.owners import tokens_of
from onceward.connectors.sqlite.store import SqliteLeaseStore, Synchronous
from onceward.telemetry.logger import OwnLogger


class SqliteConnector(LeasingConnector):
    """A `Connector` over one file on a local disk, without a server, for any number of processes.

    Creates the file if it does not exist; its directory must. With `synchronous="FULL"`, whatever was
    dispatched or settled survives a power cut; with "NORMAL" it survives a crash of the process, but a power
    cut may undo the last calls. `LeaseRules` explains `lease`, `max_deliveries`, `redelivery_delay` and
    `on_failure`; use the same values in every process of a queue. Leases and delays are measured by the time
    since the machine started, which nobody can set; a `clock`, for tests, returns seconds since the epoch, the
    same in all processes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Synchronous = "FULL",
        clock: Callable[[], float] | None = None,
        **settings: Unpack[LeaseSettings],
    ) -> None:
        self._rows = SqliteLeaseStore(path, synchronous)
        super().__init__(self._rows, LeaseRules(**settings), clock)

    def release_owner(self, owner: str) -> int:
        """End the leases of a dead owner now; they count as lost. Return how many there were."""
        with self._rows.transaction(WRITE_WAIT):
            return self._rows.release(*tokens_of(owner), self._now())


class AsyncSqliteConnector(BackgroundConnector):
    """An `AsyncConnector` over one file; settings as for `SqliteConnector`.

    A call that is canceled before its turn does not happen. One that is already running completes first;
    if it was a fetch, it gives back what it took.
    """

    kind = "SQLite"
    log = OwnLogger(logging.getLogger("onceward.connectors.sqlite.aio"))

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Synchronous = "FULL",
        clock: Callable[[], float] | None = None,
        **settings: Unpack[LeaseSettings],
    ) -> None:
        self._queue = SqliteConnector(path, synchronous=synchronous, clock=clock, **settings)
        super().__init__(self._queue)

    async def release_owner_async(self, owner: str) -> int:
        """As `SqliteConnector.release_owner`."""
        return await self._call(self._queue.release_owner, owner)
