"""What a store offers to be tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onceward.inbox import Contract
from onceward.testing.clock import FakeClock
from onceward.testing.inbox.driver import InboxDriver
from onceward.testing.inbox.samples import Killed, contract, event, raising


class InboxSuite:
    """What the database of a tested store has to offer. Each test has a database of its own."""

    def engine(self, *, patience: float = 5.0) -> Any:
        """A new engine, or async engine, to the test's own database. It waits for locks for `patience` seconds,
        where it waits at all."""
        raise NotImplementedError

    def engine_without_tables(self) -> Any:
        """One to a database without the inbox's tables."""
        return self.engine()

    def advance(self, driver: InboxDriver, seconds: float) -> None:
        """Let time pass. Override it for a database with a clock of its own."""
        driver.clock.advance(seconds)

    one_writer = False
    """Whether a transaction that writes keeps all others from writing."""

    @contextmanager
    def inbox(
        self, *contracts: Contract, patience: float = 5.0, clock: Callable[[], float] | None = None
    ) -> Iterator[InboxDriver]:
        """An inbox on the empty database, with these consumers registered and a table that handlers write to."""
        with InboxDriver(
            self.engine(patience=patience), FakeClock(1_600_000_000.0) if clock is None else clock
        ) as driver:
            driver.call("migrate")
            for each in contracts or (contract(),):
                driver.call("register", each)
            driver.do(
                "CREATE TABLE IF NOT EXISTS written (tracking_id text NOT NULL, note text, place integer)"
            )
            yield driver

    @contextmanager
    def another(self, driver: InboxDriver, *, patience: float = 5.0) -> Iterator[InboxDriver]:
        """An inbox on the same database, as another process would have."""
        with InboxDriver(self.engine(patience=patience), driver.clock) as second:
            yield second

    def written(self, driver: InboxDriver) -> list[str]:
        """What has taken effect: the ids that handlers wrote, and that were committed."""
        rows = driver.rows("SELECT tracking_id FROM written ORDER BY tracking_id")
        return [row["tracking_id"] for row in rows]

    def crash(self, driver: InboxDriver, promised: Contract, delivered: Any, handler: Any = None) -> None:
        """Start it and never come to an end; then wait until its lease is over."""
        self.abandon(driver, promised, delivered, handler)
        self.advance(driver, promised.lease + 1)

    def abandon(self, driver: InboxDriver, promised: Contract, delivered: Any, handler: Any = None) -> None:
        """Start it and never come to an end."""
        killed = False
        try:
            driver.process(promised, delivered, handler or raising(Killed()))
        except Killed:
            killed = True
        assert killed, "the handler was not called"


__all__ = ["InboxDriver", "InboxSuite", "contract", "event"]
