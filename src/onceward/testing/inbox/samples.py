"""Events, contracts and handlers to test with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from threading import Event as Flag
from typing import Any
from uuid import uuid4

from onceward.inbox import Contract, Event
from onceward.testing.inbox.driver import LIMIT

LONG_AGO = datetime(2020, 5, 5, 12, tzinfo=UTC)


class Killed(BaseException):
    """Stands for a killed process: the attempt is left without an end."""


def contract(consumer_id: str = "billing", **more: Any) -> Contract:
    values: dict[str, Any] = {
        "consumer_id": consumer_id,
        "event_types": ["order.paid"],
        "owner_team": "payments",
        "idempotency_mechanism": "dedup row and order in one transaction",
    }
    return Contract(**{**values, **more})


def event(tracking_id: str | None = None, payload: Any = None, **more: Any) -> Event:
    values: dict[str, Any] = {
        "tracking_id": uuid4().hex if tracking_id is None else tracking_id,
        "event_type": "order.paid",
        "created_at": LONG_AGO,
        "payload": {"amount": 1} if payload is None else payload,
    }
    return Event(**{**values, **more})


def write(event: Event, session: Any) -> None:
    """Write one row each time the event takes effect."""
    session.execute("INSERT INTO written (tracking_id) VALUES (:id)", {"id": event.tracking_id})


def write_then(act: Callable[[], Any]) -> Callable[[Event, Any], Any]:
    def handle(event: Event, session: Any) -> Any:
        write(event, session)
        return act()

    return handle


def never(event: Event, session: Any) -> None:
    raise AssertionError("the handler was called")


def raising(error: BaseException) -> Callable[..., Any]:
    """A handler, or an effect, that raises."""

    def handle(*_: Any) -> Any:
        raise error

    return handle


class Held:
    """A call in another thread that stops in the middle until it is released."""

    def __init__(self) -> None:
        self._arrived = Flag()
        self._released = Flag()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="held")
        self._running: Future[Any] | None = None

    def begin(self, call: Callable[..., Any], *arguments: Any) -> Held:
        self._running = self._thread.submit(call, *arguments)
        return self

    def until_inside(self) -> Held:
        assert self._arrived.wait(LIMIT), "it never began"
        return self

    @property
    def is_inside(self) -> bool:
        return self._arrived.is_set()

    def stay(self) -> None:
        """Stop here until released. The held call calls it."""
        self._arrived.set()
        assert self._released.wait(LIMIT), "it was never released"

    def release(self) -> None:
        self._released.set()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._thread.shutdown()

    def end(self) -> Any:
        """Release the call, and return what it returned or raised."""
        self.release()
        assert self._running is not None
        try:
            return self._running.result(LIMIT)
        except BaseException as error:  # noqa: BLE001
            return error


def together(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Run several calls at once; return what each returned or raised."""

    def one(number: int) -> Any:
        try:
            return call(number)
        except BaseException as error:  # noqa: BLE001
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))
