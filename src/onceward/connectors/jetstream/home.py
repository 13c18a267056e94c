"""The connection of one process to a stream, and what it knows of the server."""

from __future__ import annotations

import asyncio
import os

from onceward.connectors.jetstream import places
from onceward.connectors.jetstream.ledger import DeliveryLedger
from onceward.connectors.jetstream.line import QueueLine

NOT_READ = places.StreamSettings()


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
        self._subject = ""

    async def publishes_to(self, stream: str, given: str | None) -> str:
        self._subject = self._subject or await places.find_subject(self.link, stream, self.settings, given)
        return self._subject
