"""How an attempt learns that it should stop, and how the calls it waits for are ended.

Nothing is raised inside a running thread: an exception from outside can arrive between taking a lock and the `try` that
releases it, and then that lock is taken forever. Instead the attempt's token is set, and the functions registered with
`on_cancel` are called, each in a thread of its own. Onceward's own calls (sessions, effects, nested calls) register
theirs, and raise `AttemptInterrupted` if they are begun after the token was set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from onceward.task.exceptions import AttemptInterrupted
from onceward.task.script import TimeLimit
from onceward.telemetry.context import attempt_expired, current_attempt
from onceward.telemetry.logger import OwnLogger

logger = OwnLogger(logging.getLogger("onceward.engine"))


class Canceller:
    """Ends one wait of an attempt. Called at most once; never after `close` has returned."""

    __slots__ = ("_cancel", "_closed", "_lock", "called")

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.called = False
        self._cancel = cancel
        self._closed = False
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self._closed or self.called:
                return
            self.called = True
            try:
                self._cancel()
            except BaseException as error:  # noqa: BLE001  it belongs to the user
                logger.warning("a canceller failed, so its attempt may go on: %r", error)

    def close(self) -> None:
        """Waits until the call, if it has begun, has ended."""
        with self._lock:
            self._closed = True


class CancelToken(msgspec.Struct, eq=False):
    """Whether an attempt was asked to stop, and what ends the calls it waits for."""

    limit: TimeLimit = TimeLimit.STEP
    expired: bool = False
    over: bool = False
    """Whether the attempt has ended. What it leaves running, such as a pool's own task, is not part of it."""
    _cancellers: list[Canceller] = msgspec.field(default_factory=list)

    @property
    def hurried(self) -> bool:
        return False

    def add(self, cancel: Callable[[], object]) -> Canceller:
        """Have this called when the attempt is asked to stop; now, if it already was."""
        canceller = Canceller(cancel)
        # Without a lock, which the watchdog might have to wait for. A token that is set now has it, or is seen below.
        self._cancellers.append(canceller)
        if self.expired:
            canceller()
        return canceller

    def remove(self, canceller: Canceller) -> None:
        self._cancellers.remove(canceller)
        # `cancel` sets it before it looks for cancellers: otherwise nobody calls this one any more.
        if self.expired:
            canceller.close()

    def cancel(self) -> None:
        """Set the token, and call the cancellers without waiting for them."""
        self.expired = True
        for each in list(self._cancellers):
            threading.Thread(target=each, name="onceward-cancel", daemon=True).start()


def current_token() -> CancelToken | None:
    """The token of the attempt running here; None outside an engine, or if the attempt has no time limit."""
    token: Any = current_attempt.get()
    return None if token is None or token.over else token


def cancel_requested() -> bool:
    """Whether the attempt running here was asked to stop: its time is up, or the run is ending."""
    return attempt_expired()


def raise_if_cancelled() -> None:
    """Raise AttemptInterrupted if the attempt running here was asked to stop."""
    token = current_token()
    if token is not None and token.expired:
        raise AttemptInterrupted("this attempt ran out of time; what it does now is discarded")


@contextmanager
def on_cancel(cancel: Callable[[], object]) -> Iterator[None]:
    """Call `cancel()` if the attempt is asked to stop while the block runs: `with on_cancel(connection.close): …`.

    It is called once, in another thread, and must end what the block waits for, and nothing else: close a socket that
    only this block uses, set an event. Leaving the block waits for `cancel`, so hold no lock then that `cancel` needs.
    If the attempt was asked to stop before, this raises `AttemptInterrupted`. Outside an engine it does nothing.
    """
    token = current_token()
    if token is None:
        yield
        return
    raise_if_cancelled()
    canceller = token.add(cancel)
    try:
        yield
    finally:
        token.remove(canceller)
