"""How many workers may take work for a group at once. The others wait for their turn before they take anything, so
what is fetched stays together."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Generator
from types import coroutine
from typing import Any

from onceward.task.script import release


class BlockingTurns:
    def __init__(self, number: int) -> None:
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(number):
            self._free.put(None)
        self.take = self._free.get

    def give(self) -> None:
        self._free.put(None)


class AsyncTurns:
    def __init__(self, number: int, on_cancel: Callable[[BaseException], object]) -> None:
        """`on_cancel` raises the cancellation of a worker that has to end."""
        self._free = number
        self._on_cancel = on_cancel
        self._waiting: deque[asyncio.Future[None]] = deque()

    @coroutine
    def take(self) -> Generator[Any, Any, None]:
        while self._free == 0:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                yield from turn
            except asyncio.CancelledError as error:
                self._on_cancel(error)
        self._free -= 1

    def give(self) -> None:
        self._free += 1
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                release(turn)
                return
