"""The hooks that a connector's test class provides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from onceward.connectors import DeadMessage
from onceward.testing.clock import FakeClock
from onceward.testing.connectors.driver import ConnectorDriver

Test = TypeVar("Test", bound=Callable[..., None])


def needs(hook: str) -> Callable[[Test], Test]:
    """Leave the test out of classes that do not provide this hook."""

    def mark(test: Test) -> Test:
        test.needs = hook  # type: ignore[attr-defined]
        return test

    return mark


class ConnectorSuite:
    """What a connector under test provides. Each test opens its own queue with `make`."""

    def make(self, clock: Callable[[], float], **settings: Any) -> Any:
        """Return a connector to a new, empty queue.

        `settings` are some of `lease`, `max_deliveries`, `redelivery_delay` and `on_failure`, as in `LeaseRules`.
        """
        raise NotImplementedError

    def advance(self, clock: FakeClock, seconds: float) -> None:
        """Let time pass. For a connector that does not accept a clock, override it: sleep, or move the server's."""
        clock.advance(seconds)

    def dead_letters(self, driver: ConnectorDriver) -> list[DeadMessage]:
        """The dead letters, oldest first."""
        letters: list[DeadMessage] = driver.call("dead_letters")
        return letters

    reopen: Callable[..., Any] | None = None
    """`reopen(connector, clock, **settings)`: return a second connector to the same queue, as in another process."""

    cut: Callable[..., None] | None = None
    """`cut(connector)`: close all its connections to the server, which keeps running."""

    releases: bool | None = None
    """Set it to True, and provide `reopen`, if the connector has an `owner` and `release_owner`."""

    make_waiting: Callable[..., Any] | None = None
    """`make_waiting(**settings)`: return a connector with `await_transactions` to a new queue, without a clock."""

    put_raw: Callable[..., None] | None = None
    """`put_raw(connector, body)`: put these bytes on the queue as they are."""

    @contextmanager
    def queue(self, **settings: Any) -> Iterator[tuple[ConnectorDriver, FakeClock]]:
        clock = FakeClock(1_000_000_000.0)
        with ConnectorDriver(self.make(clock, **settings)) as driver:
            yield driver, clock
