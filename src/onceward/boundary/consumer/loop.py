"""The loop of a boundary's consumer, in threads and in asyncio."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from onceward._process.aside import Stopped
from onceward._process.stop import AsyncStop, BlockingStop
from onceward.boundary.errors import BoundaryError
from onceward.boundary.model import Page, StoredFact
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

EMPTY_WAIT = 0.1
"""Seconds to wait when there is nothing new."""

T = TypeVar("T")
Attempt = Callable[[StoredFact], Awaitable[BaseException | None]]
"""Runs the handler in one session, and commits. Returns what was raised."""


class FactLoop:
    """The loop of both modes. Methods that wait are ports: they block in one mode and await in the other."""

    _fetch: Callable[[int], Awaitable[Page]]
    """Confirms up to this offset in the same call, unless it is 0."""
    _confirm: Callable[[int], Awaitable[None]]

    def __init__(
        self, consumer_name: str, limit: int, empty_wait: float, stop: BlockingStop | AsyncStop
    ) -> None:
        if not consumer_name:
            raise ConfigurationError("a boundary consumer needs a durable name: it identifies its cursor")
        if limit < 1:
            raise ConfigurationError(f"limit must be 1 or more, not {limit}")
        if not empty_wait > 0:
            raise ConfigurationError(f"empty_wait must be more than 0 seconds, not {empty_wait}")
        self.consumer_name = consumer_name
        self.limit = limit
        self._empty_wait = empty_wait
        self._stop = stop
        self._reported_gap = 0

    def stop(self) -> None:
        """Stop permanently after the fact in flight. Safe in a signal handler and from any thread.

        In the middle of a batch nothing of it is confirmed: facts already applied are delivered again, as duplicates.
        A wait for the boundary ends within a second, whether the boundary answers or not.
        """
        self._stop.request()

    async def _run(self, attempt: Attempt, drain: bool) -> BaseException | None:
        handled = 0
        """The last fact of a batch that is applied, and is confirmed with the next fetch."""
        while not self._is_stopped():
            page = await self._confirming(self._fetch, handled)
            if page is None:
                return None
            handled = 0
            self._report_gap(page)
            if page.facts:
                for fact in page.facts:
                    if self._is_stopped():
                        return None
                    error = await attempt(fact)
                    if error is not None:
                        return self._report(error, fact)
                handled = page.facts[-1].offset
            elif drain:
                return None
            else:
                await self._stop.pause(self._empty_wait)
        if handled:
            await self._confirming(self._confirm, handled)
        return None

    def _is_stopped(self) -> bool:
        return self._stop.requested

    async def _confirming(self, call: Callable[[int], Awaitable[T]], offset: int) -> T | None:
        """Make a call that confirms up to this offset, unless it is 0. Return None if a stop came before its answer."""
        try:
            return await call(offset)
        except Stopped:
            if offset:
                _log.warning(
                    "consumer %s stopped before the boundary answered the confirmation of offset %d; everything up to "
                    "it is applied, and is delivered again if the boundary did not record this",
                    self.consumer_name,
                    offset,
                    extra={"consumer": self.consumer_name, "offset": offset},
                )
            return None
        except BoundaryError as error:
            if offset:
                error.add_note(
                    f"while confirming offset {offset} of consumer {self.consumer_name}; everything up to it is "
                    "applied, and is delivered again if the boundary did not record this"
                )
            raise

    def _report_gap(self, page: Page) -> None:
        """Once per gap: every page reports it again until the cursor has passed it."""
        if page.gap is None or page.gap.last_missing <= self._reported_gap:
            return
        first = max(page.gap.first_missing, self._reported_gap + 1)
        self._reported_gap = page.gap.last_missing
        _log.error(
            "consumer %s missed facts %d to %d: they have expired",
            self.consumer_name,
            first,
            self._reported_gap,
            extra={"consumer": self.consumer_name, "offset": first},
        )

    def _report(self, error: BaseException, fact: StoredFact) -> BaseException:
        where = f"message_id {fact.message_id}, offset {fact.offset}, consumer {self.consumer_name}"
        error.add_note(f"while applying the fact with {where}; nothing of its batch was confirmed")
        if isinstance(error, Exception):  # an interrupt is not a failure of the fact
            _log.error(
                "a fact failed, so its batch is not confirmed: %s: %s: %s",
                where,
                type(error).__name__,
                error,
                extra={"message_id": fact.message_id, "offset": fact.offset, "consumer": self.consumer_name},
            )
        return error
