"""The connector for threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from onceward.connectors.leasing import LeasingConnector
from onceward.connectors.rules import LeaseRules, OnFailure
from onceward.connectors.sqlite.database import Database, Synchronous
from onceward.connectors.sqlite.store import SqliteStore


class SqliteConnector(LeasingConnector):
    """A `Connector` over one file on a local disk, without a server, for any number of processes.

    The file is made if it does not exist; its directory must. With `synchronous="FULL"` what was dispatched
    or settled survives a power cut; with "NORMAL" it survives a crash of the process, and the last calls may
    be undone by a power cut. `lease`, `max_deliveries`, `redelivery_delay` and `on_failure` are explained at
    `LeaseRules`; give every process of one queue the same. `clock` tells the time in seconds since the epoch,
    the same in all processes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        lease: float = 60.0,
        max_deliveries: int = 5,
        redelivery_delay: float = 1.0,
        on_failure: OnFailure = "auto",
        synchronous: Synchronous = "FULL",
        clock: Callable[[], float] = time.time,
    ) -> None:
        rules = LeaseRules(
            lease=lease,
            max_deliveries=max_deliveries,
            redelivery_delay=redelivery_delay,
            on_failure=on_failure,
        )
        super().__init__(SqliteStore(Database(path, synchronous)), rules, clock)
