"""The loop of a boundary's consumer, in threads and in asyncio."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from onceward.boundary.errors import BoundaryError
from onceward.boundary.model import Page, StoredFact
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

EMPTY_WAIT = 0.1
"""Seconds to wait when there is nothing new."""
LONGEST_NAP = 0.1
"""Seconds. Longer waits are split into naps, so they end soon after `stop()`, which need not wake them."""

Attempt = Callable[[StoredFact], Awaitable[BaseException | None]]
"""Runs the handler in one session, and commits. Returns what was raised."""


class FactLoop:
    """The loop of both modes. Methods that wait are ports: they block in one mode and await in the other."""

    _fetch: Callable[[], Awaitable[Page]]
    _confirm: Callable[[int], Awaitable[None]]
    _nap: Callable[[float], Awaitable[None]]

    def __init__(self, consumer_name: str, limit: int, empty_wait: float) -> None:
        if not consumer_name:
            raise ConfigurationError("a boundary consumer needs a durable name: it identifies its cursor")
        if limit < 1:
            raise ConfigurationError(f"limit must be 1 or more, not {limit}")
        if not empty_wait > 0:
            raise ConfigurationError(f"empty_wait must be more than 0 seconds, not {empty_wait}")
        self.consumer_name = consumer_name
        self.limit = limit
        self._empty_wait = empty_wait
        self._stop_requested = False

    def stop(self) -> None:
        """Stop permanently after the fact in flight. Safe in a signal handler and from any thread.

        In the middle of a batch nothing of it is confirmed: facts already applied are delivered again, as duplicates.
        """
        self._stop_requested = True

    async def _run(self, attempt: Attempt, drain: bool) -> BaseException | None:
        while not self._is_stopped():
            page = await self._fetch()
            self._report_gap(page)
            if page.facts:
                for fact in page.facts:
                    if self._is_stopped():
                        return None
                    error = await attempt(fact)
                    if error is not None:
                        return self._report(error, fact)
                await self._confirm_batch(page)
            elif drain:
                return None
            else:
                await self._wait()
        return None

    def _is_stopped(self) -> bool:
        return self._stop_requested

    async def _confirm_batch(self, page: Page) -> None:
        offset = page.facts[-1].offset
        try:
            await self._confirm(offset)
        except BoundaryError as error:
            error.add_note(
                f"while confirming offset {offset} of consumer {self.consumer_name}; everything up to it is applied, "
                "and is delivered again if the boundary did not record this"
            )
            raise

    async def _wait(self) -> None:
        left = self._empty_wait
        while left > 0 and not self._is_stopped():
            await self._nap(min(left, LONGEST_NAP))
            left -= LONGEST_NAP

    def _report_gap(self, page: Page) -> None:
        if page.gap is not None:
            _log.error(
                "consumer %s missed facts %d to %d: they have expired",
                self.consumer_name,
                page.gap.first_missing,
                page.gap.last_missing,
                extra={"consumer": self.consumer_name, "offset": page.gap.first_missing},
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
