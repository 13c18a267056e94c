"""Wakes tasks that wait until something arrives in this process, such as a fact in a boundary."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Arrivals:
    """`tell` ends all waits. Who waits enters first and looks then, so it misses nothing in between."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._closed = False

    def tell(self) -> None:
        for event, loop in list(self._waiting.items()):
            with suppress(RuntimeError):  # the loop is closed; nothing waits there
                loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """End all waits, also those to come: the server stops."""
        self._closed = True
        self.tell()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def enter(self) -> asyncio.Event:
        """Return an event that the next `tell` sets. `leave` follows."""
        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        return event

    def leave(self, event: asyncio.Event) -> None:
        del self._waiting[event]
