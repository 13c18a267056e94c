"""What a demo is made with, and what follows from it. Parent and children share it."""

from __future__ import annotations

from pathlib import Path

import msgspec

SHOP, WAREHOUSE = "shop", "warehouse"
"""The two zones."""
CONSUMER = "shipping"
"""The name of the cursor at the warehouse, of the contract, and of the dead letters."""
SLOTS = 4
"""Orders a worker has in flight at once."""
STEP_TIMEOUT = 2.0
"""Seconds after which an attempt that hangs is interrupted."""
MAX_DELIVERIES = 3
LEASE = 3.0
"""Seconds after which an order that a killed worker had in hand is free for others."""
SECONDS_TO_WATCH = 6.0
"""How long the carrier takes over all orders of a demo of usual size, shared by all slots."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    orders: int
    workers: int
    seed: int
    folder: str
    """Where the stores of both zones, ledger, journal and logs are."""

    @property
    def ledger(self) -> Path:
        """Inbox, dead letters and shipments: one database, because they share transactions."""
        return Path(self.folder) / "ledger.db"

    @property
    def journal(self) -> Path:
        return Path(self.folder) / "journal.db"

    def log(self, process: str) -> Path:
        return Path(self.folder) / f"{process}.log"

    @property
    def batch(self) -> int:
        """Small enough that every worker of a small demo gets some."""
        return min(20, max(5, self.orders // (10 * self.workers)))

    @property
    def seconds_per_check(self) -> float:
        """How long the carrier thinks: few orders need slow ones, or there is no half-way to be killed at."""
        return min(0.1, max(0.01, SECONDS_TO_WATCH * self.workers * SLOTS / self.orders))
