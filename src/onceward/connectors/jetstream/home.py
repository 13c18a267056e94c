"""The connection of one process to a stream, and what it knows of the server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from contextlib import suppress

from onceward._nats.connection import NatsUnavailable
from onceward.connectors.jetstream import places
from onceward.connectors.jetstream.ledger import DeliveryLedger
from onceward.connectors.jetstream.line import QueueLine

NOT_READ = places.StreamSettings()
CLOSE_WAIT = 2.0
"""Seconds."""
TIDY_AFTER = 100
"""Messages with a state that were acknowledged, after which states are removed."""


async def try_soon(work: Awaitable[object]) -> None:
    """Do what a connector owes others when it closes, unless the server is away or silent: then leases expire."""
    with suppress(NatsUnavailable, TimeoutError):
        async with asyncio.timeout(CLOSE_WAIT):
            await work


class QueueHome:
    """The connection of this process, and what is known of the server."""

    link: QueueLine
    ledger: DeliveryLedger

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.opening = asyncio.Lock()
        self.sending = asyncio.Lock()
        self.is_connected = False
        self.settings = NOT_READ
        self.consumes = False
        self.tidying: asyncio.Task[None] | None = None
        self._ended = 0
        """Messages with a state that were acknowledged since states were removed."""
        self._subject = ""

    def follow(self) -> None:
        """If a stream was not there, look for all of them again: someone deleted it, or NATS came back without it."""
        if self.link.is_astray:
            self.link.is_astray = False
            self.settings, self.consumes = NOT_READ, False

    def tidy(self) -> None:
        """Remove states that nobody needs, in the background."""
        self._ended = 0
        self.tidying = asyncio.create_task(self._tidy())

    def tidy_after(self, ended: int) -> None:
        """So many messages with a state were acknowledged."""
        self._ended += ended
        if self._ended >= TIDY_AFTER and self.tidying is not None and self.tidying.done():
            self.tidy()

    async def _tidy(self) -> None:
        with suppress(NatsUnavailable):  # the next one does it
            await self.ledger.tidy()

    async def publishes_to(self, stream: str, given: str | None) -> str:
        self._subject = self._subject or await places.find_subject(self.link, stream, self.settings, given)
        return self._subject
