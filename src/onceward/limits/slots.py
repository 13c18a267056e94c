"""Extends the leases of slots in the background, and frees those that nobody here needs.

The loop may wait for its source, or stop while handlers go on. Their slots must not depend on that.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from onceward.limits.limiter import MOMENT, Limiter
from onceward.limits.records import LEASE
from onceward.task.lifecycle import text_of
from onceward.telemetry.context import current_work
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.limits"))

AGAIN: Final = 0.25
"""Seconds until the next try, if the database is away."""


class SlotKeeper:
    """Runs from the first slot of a call until its end: a thread, or a task of the event loop."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._records = limiter.records
        self._asynchronous = False
        self._running = False
        self._over = False

    def bind(self, task: Any) -> None:
        self._now = task.clock.now
        self._asynchronous = task.asynchronous

    def begin(self) -> None:
        if not self._running:
            self._running, self._over = True, False
            self._records.ports.spawn(self._keep())

    async def end(self) -> None:
        """Return when it has ended."""
        self._over = True
        self._limiter.bell.ring()
        while self._running:
            await self._records.ports.sleep(0.001)

    async def _keep(self) -> None:
        current_work.set(None)  # a stop of the loop does not end it: handlers go on
        limiter, renewed = self._limiter, self._now()
        try:
            while not self._over:
                with limiter.lock:
                    freed = limiter.take_freed(self._now())
                    tokens = list(limiter.leases)
                due = renewed + LEASE / 3
                try:
                    if freed:
                        await self._records.free({token: each.seconds for token, each in freed.items()})
                    if tokens and self._now() >= due:
                        renewed = self._now()
                        await self._renew(tokens, renewed)
                except Exception as error:  # noqa: BLE001  the database may be away; leases last for a while
                    with limiter.lock:
                        limiter.freed.update(freed)
                    _log.warning(
                        "cannot extend or free %d slots yet: %s", len(tokens) + len(freed), text_of(error)
                    )
                    renewed = min(renewed, self._now() - LEASE / 3)
                    await self._records.ports.sleep(AGAIN)
                    continue
                if not tokens:
                    renewed = self._now()
                if not freed:
                    left = MOMENT if limiter.freed else max(due - self._now(), 0.0)
                    await limiter.sleep(left, asynchronous=self._asynchronous, unless=lambda: self._over)
        finally:
            self._running = False

    async def _renew(self, tokens: list[str], before: float) -> None:
        limiter = self._limiter
        ours = await self._records.renew(tokens)
        with limiter.lock:
            for token in tokens:
                if token in ours and token in limiter.leases:
                    limiter.leases[token] = before + LEASE
                else:
                    limiter.leases.pop(token, None)
