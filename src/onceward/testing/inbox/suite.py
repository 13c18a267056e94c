"""The hooks that a store's test class provides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onceward.inbox import Contract
from onceward.testing.clock import FakeClock
from onceward.testing.inbox.driver import InboxDriver
from onceward.testing.inbox.samples import Killed, contract, event, raising


class InboxSuite:
    """What a store under test provides. Each test has its own database."""

    def engine(self, *, patience: float = 5.0) -> Any:
        """Return a new engine, or async engine, for the test's database. Lock waits time out after `patience` seconds,
        if the database waits at all."""
        raise NotImplementedError

    def engine_without_tables(self) -> Any:
        """Return an engine for a database without the inbox tables."""
        return self.engine()

    def advance(self, driver: InboxDriver, seconds: float) -> None:
        """Let time pass. Override it for a database that uses its own clock."""
        driver.clock.advance(seconds)

    one_writer = False
    """Whether a transaction that writes blocks all other writers."""

    @contextmanager
    def inbox(
        self, *contracts: Contract, patience: float = 5.0, clock: Callable[[], float] | None = None
    ) -> Iterator[InboxDriver]:
        """An inbox on an empty database, with these consumers registered and a table that handlers write to."""
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
        """Another inbox on the same database, as in another process."""
        with InboxDriver(self.engine(patience=patience), driver.clock) as second:
            yield second

    def written(self, driver: InboxDriver) -> list[str]:
        """The ids that handlers wrote and that were committed."""
        rows = driver.rows("SELECT tracking_id FROM written ORDER BY tracking_id")
        return [row["tracking_id"] for row in rows]

    def crash(self, driver: InboxDriver, promised: Contract, delivered: Any, handler: Any = None) -> None:
        """Start an event, leave its attempt without an end, and wait until its lease expires."""
        self.abandon(driver, promised, delivered, handler)
        self.advance(driver, promised.lease + 1)

    def abandon(self, driver: InboxDriver, promised: Contract, delivered: Any, handler: Any = None) -> None:
        """Start an event, and leave its attempt without an end."""
        killed = False
        try:
            driver.process(promised, delivered, handler or raising(Killed()))
        except Killed:
            killed = True
        assert killed, "the handler was not called"


__all__ = ["InboxDriver", "InboxSuite", "contract", "event"]
