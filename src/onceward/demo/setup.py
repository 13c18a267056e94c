"""The arguments of a demo and what follows from them. Parent and children share it."""

from __future__ import annotations

from pathlib import Path

import msgspec

SHOP, WAREHOUSE = "shop", "warehouse"
"""The two zones."""
CONSUMER = "shipping"
"""The name of the cursor at the warehouse, of the contract, and of the dead letters."""
SLOTS = 4
"""Orders that a worker has in flight at once."""
STEP_TIMEOUT = 2.0
"""Seconds after which a hanging attempt is interrupted."""
MAX_DELIVERIES = 3
LEASE = 3.0
"""Seconds after which other workers may take an order that a killed worker had in flight."""
SECONDS_TO_WATCH = 6.0
"""How long the carrier takes for all orders of a demo of the default size, shared by all slots."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    orders: int
    workers: int
    seed: int
    folder: str
    """Directory of both zones' stores, ledger, journal and logs."""

    @property
    def ledger(self) -> Path:
        """Inbox, dead letters and shipments, in one database because they share transactions."""
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
        """Seconds per call of the carrier: slower for few orders, or there is no middle at which to kill a worker."""
        return min(0.1, max(0.01, SECONDS_TO_WATCH * self.workers * SLOTS / self.orders))
