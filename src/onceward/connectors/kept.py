"""Connectors that a process keeps open to send with: one for each address, and in asyncio one for each event loop, too.

Threads share them. A forked child opens its own. They are closed when the process exits, those of an event loop when it
shuts down its async generators, as `asyncio.run` does at its end.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

from onceward.connectors.urls import Address
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.connectors.kept"))


class KeptConnectors:
    """The open connectors of this process, by URL."""

    def __init__(self) -> None:
        self._keeps = True
        self.opening = threading.RLock()
        """Held while one is opened, with all that is imported for that. A fork waits: a child that imports what a
        thread of its parent was importing would wait forever."""
        self._blocking: dict[str, Any] = {}
        self._loops: dict[asyncio.AbstractEventLoop, _LoopConnectors] = {}
        self._inherited: list[Any] = []
        """Of a parent process. They stay referenced: closing them would end what the parent has open."""
        self.sending: set[int] = set()
        """The threads that are just sending over one for threads."""

    def take(self, address: Address) -> Any:
        """Return the connector for threads to this address. It is not yours to close."""
        found = self._blocking.get(address.url)
        if found is None and not self._keeps:
            return address.open(asynchronous=False)
        if found is None:
            with self.opening:
                found = self._blocking.get(address.url)
                if found is None:
                    found = self._blocking[address.url] = address.open(asynchronous=False)
        return found

    async def take_async(self, address: Address) -> Any:
        """Return the connector to this address for the running event loop. It is not yours to close."""
        if not self._keeps:
            return address.open(asynchronous=True)
        loop = asyncio.get_running_loop()
        mine = self._loops.get(loop)
        if mine is None:
            self._forget_closed_loops()
            mine = _LoopConnectors()
            await mine.begin()
            mine = self._loops.setdefault(loop, mine)
        found = mine.open.get(address.url)
        if found is None:
            async with mine.opening[address.url]:
                found = mine.open.get(address.url)
                if found is None:
                    found = mine.open[address.url] = await address.open_async()
        return found

    def drop(self, address: Address, connector: Any) -> None:
        """Close a connector that has failed, so the next send begins with a new one."""
        with self.opening:
            if self._blocking.get(address.url) is not connector:
                return
            del self._blocking[address.url]
        _close(connector)

    async def drop_async(self, address: Address, connector: Any) -> None:
        """`drop` in the running event loop."""
        mine = self._loops.get(asyncio.get_running_loop())
        if mine is not None and mine.open.get(address.url) is connector:
            del mine.open[address.url]
            await _close_async(connector)

    def close(self) -> None:
        """Close those for threads. The process exits."""
        while self._blocking:
            _close(self._blocking.popitem()[1])

    def hold(self) -> None:
        """Before a fork."""
        self.opening.acquire()

    def let_go(self) -> None:
        """After it, in the parent."""
        self.opening.release()

    def leave_to_parent(self) -> None:
        """Start again in a forked child, without touching what the parent has open."""
        self._inherited += [self._blocking, self._loops]
        self._blocking, self._loops, self.opening, self.sending = {}, {}, threading.RLock(), set()

    def keep_nothing(self) -> None:
        """Open a connector for each call from now on: a verification decides at every call whether it may be opened."""
        self.leave_to_parent()
        self._keeps = False

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loops.pop(loop, None)

    def _forget_closed_loops(self) -> None:
        """Drop the connectors of event loops that ended without shutting down their async generators."""
        for loop in [each for each in list(self._loops) if each.is_closed()]:
            self._loops.pop(loop, None)


class _LoopConnectors:
    """The connectors of one event loop. It closes them when it shuts down its async generators."""

    def __init__(self) -> None:
        self.open: dict[str, Any] = {}
        self.opening: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._lifetime = self._live()

    async def begin(self) -> None:
        await anext(self._lifetime)  # from here on the event loop knows it

    async def _live(self) -> AsyncGenerator[None]:
        loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            kept.forget(loop)
            while self.open:
                await _close_async(self.open.popitem()[1])


def _close(connector: Any) -> None:
    try:
        connector.close()
    except Exception as error:  # noqa: BLE001  it is not needed any more
        _log.info("a connector could not be closed: %s", error)


async def _close_async(connector: Any) -> None:
    try:
        await connector.close_async()
    except Exception as error:  # noqa: BLE001  it is not needed any more
        _log.info("a connector could not be closed: %s", error)


kept = KeptConnectors()
"""Those of this process."""

atexit.register(kept.close)
# Of the hooks before a fork, the last one runs first: so a fork takes this lock before those of SQLite's queues, which
# are imported by now, as a thread does that opens one of them.
os.register_at_fork(before=kept.hold, after_in_parent=kept.let_go, after_in_child=kept.leave_to_parent)
