"""What a connector offers to be tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from onceward.connectors import DeadLetter
from onceward.testing.clock import FakeClock
from onceward.testing.connectors.driver import ConnectorDriver

Test = TypeVar("Test", bound=Callable[..., None])


def needs(hook: str) -> Callable[[Test], Test]:
    """Leaves the test out of suites that do not offer this hook."""

    def mark(test: Test) -> Test:
        test.needs = hook  # type: ignore[attr-defined]
        return test

    return mark


class ConnectorSuite:
    """What a tested connector has to offer. Each test opens a queue of its own by `make`."""

    def make(self, clock: Callable[[], float], **settings: Any) -> Any:
        """A connector to a new, empty queue, with these settings: some of `lease`, `max_deliveries`,
        `redelivery_delay` and `on_failure`, with the meaning they have in `LeaseRules`."""
        raise NotImplementedError

    def advance(self, clock: FakeClock, seconds: float) -> None:
        """Let time pass. Override it for a connector that cannot be given a clock: sleep, or tell
        its server."""
        clock.advance(seconds)

    def dead_letters(self, driver: ConnectorDriver) -> list[DeadLetter]:
        """The dead letters, longest dead first."""
        letters: list[DeadLetter] = driver.call("dead_letters")
        return letters

    reopen: Callable[..., Any] | None = None
    """`reopen(connector, clock, **settings)`: a second connector to the same queue, as another process
    would have."""

    cut: Callable[..., None] | None = None
    """`cut(connector)`: end every connection it has to its server, which stays up."""

    put_raw: Callable[..., None] | None = None
    """`put_raw(connector, body)`: put these bytes on the queue, whatever they are."""

    @contextmanager
    def queue(self, **settings: Any) -> Iterator[tuple[ConnectorDriver, FakeClock]]:
        clock = FakeClock(1_000_000_000.0)
        with ConnectorDriver(self.make(clock, **settings)) as driver:
            yield driver, clock
