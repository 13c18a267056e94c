"""One attempt at one event, and what is logged about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from onceward._process.forks import end_child, forks
from onceward.inbox.attempts import Start, with_token
from onceward.inbox.contract import EVERY_TYPE, Contract
from onceward.inbox.errors import ContractError
from onceward.inbox.event import Digest, Event
from onceward.inbox.stores.types import Key, as_date
from onceward.inbox.upcasters import check_type, upcast
from onceward.task.exceptions import Postponed
from onceward.task.lifecycle import text_of
from onceward.telemetry.context import current_work
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.redaction import scrub
from onceward.telemetry.safety import quietly

if TYPE_CHECKING:
    from onceward.inbox.metrics import InboxMetrics
    from onceward.inbox.sessions.acknowledgment import Departure
    from onceward.transaction import Transaction

_log = OwnLogger(logging.getLogger("onceward.inbox"))

Handler = Callable[[Event, Any], Awaitable[Any]]
"""Wraps exceptions of user code in `Raised`."""


class EventAttempt:
    """An event, what it is handled with, and under which start."""

    __slots__ = (
        "began", "contract", "departure", "digest", "event", "handler", "key", "metrics", "original", "start",
        "transaction",
    )  # fmt: skip

    digest: Digest
    transaction: Transaction
    """Its delivery, under an engine."""

    def __init__(
        self,
        contract: Contract,
        event: Event,
        handler: Handler,
        *,
        metrics: InboxMetrics | None = None,
        key: Key | None = None,
        start: Start | None = None,
        departure: Departure | None = None,
        traced: bool = True,
    ) -> None:
        self.began = time.perf_counter()
        self.contract = contract
        self.original = event
        """As it was delivered."""
        self.event = event
        """As the handler gets it."""
        self.key = key or Key(contract.consumer_id, event.tracking_id, event.day)
        self.handler = handler
        self.metrics = metrics
        self.start = start
        """None until it is recorded."""
        self.departure = departure
        """The end of its delivery, if its queue is in the same database."""
        if traced and (span := trace.get_current_span()).is_recording():
            quietly(
                span.set_attributes,
                {
                    "consumer": contract.consumer_id,
                    "tracking_id": event.tracking_id,
                    "event_type": event.event_type,
                },
            )

    def check(self) -> None:
        """Refuse an event that the contract does not allow."""
        accepted = self.contract.event_types
        if accepted[0] != EVERY_TYPE and self.event.event_type not in accepted:
            check_type(self.contract, self.event)
        self.digest = self.event.digest

    def prepare(self, start: Start) -> None:
        """Make of the event what the handler gets."""
        self.start = start
        contract, event = self.contract, self.event
        if contract.model is not None or event.schema_version != contract.schema_version:
            generation = forks.generation  # as `UserCode`, without its calls
            try:
                event = upcast(contract, event)
            except BaseException as error:
                if forks.generation != generation:
                    end_child(f"an upcaster or the model of {contract.consumer_id}", error)
                raise
            if forks.generation != generation:
                end_child(f"an upcaster or the model of {contract.consumer_id}")
        if event.lock_token is None:
            own = event is not self.original  # `upcast` has made a copy
            event = with_token(event, start, own=own)
        self.event = event

    def count(self, handling: Any, retries: int) -> None:
        if self.metrics is not None:
            self.metrics.count(self.contract, self.original, handling, retries, self.began)

    def fail(self, error: BaseException) -> None:
        """Count and log that it failed."""
        if self.metrics is not None:
            self.metrics.count_failure(self.contract, self.original, error, self.began)
        log_failure(self.contract, self.original, error, self.start)


def log_failure(contract: Contract, event: Event, error: BaseException, start: Start | None) -> None:
    """Log everything needed to find the event but nothing of its payload.

    Under an engine it is only logged as info: the engine reports each failure as a warning or an error.
    """
    scrub(error)  # parameters usually contain the payload
    if isinstance(error, Postponed):
        return
    in_engine = current_work.get() is not None
    log = _log.info if in_engine else _log.error
    log(
        "consumer %s: event %s of type %r (aggregate %s, start %s) failed: %s",
        contract.consumer_id,
        event.tracking_id,
        event.event_type,
        event.aggregate_id,
        "-" if start is None else start.token,
        text_of(error),
        exc_info=None if in_engine or isinstance(error, ContractError) else error,
        extra={
            "consumer": contract.consumer_id,
            "tracking_id": event.tracking_id,
            "event_type": event.event_type,
            "aggregate_id": event.aggregate_id or "",
            "sequence": "" if event.sequence is None else event.sequence,
            "schema_version": event.schema_version,
            "lock_token": "" if start is None else start.token,
        },
    )


def too_old(key: Key, floor_day: int | None) -> str:
    floor = "" if floor_day is None else f" ({as_date(floor_day)})"
    return (
        f"it is from {as_date(key.day)}, before the dedup horizon{floor}, so whether it was done before is no longer "
        "known; it is not run"
    )
