"""What a demo is made with, and what follows from it. Parent and workers share it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from onceward.connectors import SqliteConnector

SLOTS = 8
"""Orders a worker has in flight at once."""
STEP_TIMEOUT = 1.0
"""Seconds after which an attempt that hangs is interrupted."""
MAX_DELIVERIES = 3
SECONDS_TO_WATCH = 6.0
"""How long the card service takes over all orders of a demo of usual size, shared by all slots."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    orders: int
    workers: int
    seed: int
    folder: str
    """Where queue, ledger, journal and logs are."""

    @property
    def queue(self) -> Path:
        return Path(self.folder) / "queue.db"

    @property
    def ledger(self) -> Path:
        return Path(self.folder) / "ledger.db"

    @property
    def journal(self) -> Path:
        return Path(self.folder) / "journal.db"

    def log(self, worker: str) -> Path:
        return Path(self.folder) / f"{worker}.log"

    @property
    def batch(self) -> int:
        """Small enough that every worker of a small demo gets some."""
        return min(50, max(5, self.orders // (10 * self.workers)))

    @property
    def seconds_per_check(self) -> float:
        """How long the card service thinks: few orders need slow ones, or there is no half-way to be killed at."""
        return min(0.15, max(0.02, SECONDS_TO_WATCH * self.workers * SLOTS / self.orders))

    def open_queue(self) -> SqliteConnector:
        """The lease is short, so that what a killed worker held is soon free again."""
        return SqliteConnector(
            self.queue, lease=2.0, max_deliveries=MAX_DELIVERIES, redelivery_delay=0.2, synchronous="NORMAL"
        )
