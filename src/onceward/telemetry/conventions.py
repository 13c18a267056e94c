"""What the semantic conventions for messaging say about the operations of a task, on its spans and as metrics.

The attributes are made once for a call. A task that does not know its messaging system has none of these metrics: the
conventions require its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from onceward.telemetry.metrics import EngineInstruments

OPERATIONS: Mapping[str, str] = {"fetch": "receive", "settle": "settle"}
"""The steps that talk to the source, and the `messaging.operation.type` of each."""
TIMED: Mapping[str, str] = {"fetch": "fetch", "settle": "settle", "process": "process", "produce": "send"}
"""The steps that have a duration in the conventions, and the `messaging.operation.name` of each."""
COUNT = "messaging.batch.message_count"
UNKNOWN = "_OTHER"
"""The `error.type` of a failure without a category, as the conventions name it."""


class Destination(NamedTuple):
    """Where messages come from or go to."""

    system: str
    """The messaging system: `redis`."""
    name: str
    """The queue, stream or log in it."""
    group: str | None = None
    """The group, or durable name, under which a consumer reads."""


class Messaging:
    """The attributes of a task's operations, and their metrics if a meter is set up."""

    def __init__(self, destination: Destination | None, metrics: EngineInstruments | None) -> None:
        self._destination = destination
        self._metrics = None if destination is None else metrics
        self._named: dict[tuple[str, str | None], dict[str, Any]] = {}

    def of_span(self, operation: str) -> dict[str, Any]:
        """The attributes of a span."""
        return {
            "messaging.operation.name": operation,
            "messaging.operation.type": OPERATIONS.get(operation, operation),
            **self._place(),
        }

    def took(self, step: str, seconds: float, failure: tuple[Any, Any] | None) -> None:
        """Record how long an attempt of a step took. `failure` is a message and a category."""
        operation = TIMED.get(step)
        if self._metrics is None or operation is None:
            return
        is_process = step == "process"
        duration = self._metrics.process_duration if is_process else self._metrics.operation_duration
        duration.record(
            seconds, self._of_metric(operation, None if failure is None else failure[1] or UNKNOWN)
        )

    def consumed(self, number: int) -> None:
        if self._metrics is not None and number:
            self._metrics.consumed.add(number, self._of_metric("fetch", None))

    def sent(self, number: int, category: Any = None) -> None:
        """Count messages that were sent, or with a category those that were not."""
        if self._metrics is not None:
            self._metrics.sent.add(number, self._of_metric("send", category))

    def _of_metric(self, operation: str, category: Any) -> dict[str, Any]:
        error = None if category is None else str(category)
        found = self._named.get((operation, error))
        if found is None:
            found = {"messaging.operation.name": operation, **self._place()}
            if error is not None:
                found["error.type"] = error
            self._named[operation, error] = found
        return found

    def _place(self) -> dict[str, Any]:
        if self._destination is None:
            return {}
        system, name, group = self._destination
        place = {"messaging.system": system, "messaging.destination.name": name}
        return place if group is None else {**place, "messaging.consumer.group.name": group}
