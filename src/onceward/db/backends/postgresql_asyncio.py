"""A connection to PostgreSQL in asyncio whose waits for the server cost little.

For each statement, `psycopg` tells the event loop to watch the socket, sets a timer, waits for a future, and takes all
of that back: half of what a short statement costs. Here the event loop goes on watching the socket between statements,
one timer serves for many, and what arrives resumes the task at once, not in the next turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any

from psycopg import AsyncConnection
from psycopg.waiting import Ready, Wait

LOOK_AGAIN = 0.1
"""Seconds after which a wait looks at its connection, as `psycopg` does, and a socket that nobody waits for is watched
no longer."""
# As plain numbers, which are compared faster.
_READ = int(Wait.R)
_ARRIVED = int(Ready.R)
_NOTHING = int(Ready.NONE)


class WatchedConnection(AsyncConnection[Any]):
    _loop: asyncio.AbstractEventLoop | None = None
    """The event loop that watches the socket, if one does."""
    _socket = -1
    _arrival: Arrival | None = None
    """What a task waits for."""
    _timer: asyncio.TimerHandle | None = None

    async def wait(self, gen: Any, *limits: Any, **more: Any) -> Any:
        loop = asyncio.get_running_loop()
        if limits or more or not isinstance(loop, asyncio.SelectorEventLoop):
            self._stop_watching()
            return await super().wait(gen, *limits, **more)
        state: Any = None
        try:
            state = next(gen)
            while state == _READ:
                state = gen.send(await self._next_arrival(loop))
        except StopIteration as end:
            return end.value
        except (asyncio.CancelledError, KeyboardInterrupt) as interrupt:
            self._stop_watching()
            return await super().wait(_Continued(gen, state, interrupt))  # type: ignore[arg-type]  # which raises it
        except BaseException:
            self._stop_watching()  # the driver may have closed the socket, and its number may soon be another's
            raise
        self._stop_watching()
        return await super().wait(_Continued(gen, state))  # type: ignore[arg-type]

    async def close(self) -> None:
        arrival = self._arrival
        self._stop_watching()
        await super().close()
        if arrival is not None:  # what another task waits for does not come any more
            arrival.get_loop().call_soon(arrival.resume, _NOTHING)

    def _next_arrival(self, loop: asyncio.AbstractEventLoop) -> Arrival:
        if self._loop is not loop:
            self._stop_watching()
            socket = self.pgconn.socket
            loop.add_reader(socket, self._arrived, _ARRIVED)
            self._loop, self._socket = loop, socket
        if self._timer is None:
            self._timer = loop.call_later(LOOK_AGAIN, self._look)
        self._arrival = arrival = Arrival(loop)
        return arrival

    def _arrived(self, what: int) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is None or not arrival.resume(what):
            self._stop_watching()  # something that nobody has asked for, or asks for any longer

    def _look(self) -> None:
        self._timer = None
        self._arrived(_NOTHING)

    def _stop_watching(self) -> None:
        loop, self._loop, self._arrival = self._loop, None, None
        timer, self._timer = self._timer, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._socket)
            if timer is not None:
                timer.cancel()


class Arrival:
    """A future, as far as a task needs one: what ends it resumes the task at once, in its own context. A `Future` would
    do so in the next turn, and the event loop would find the same bytes on the socket again before."""

    __slots__ = ("_asyncio_future_blocking", "_canceled", "_context", "_loop", "_resume", "_what")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._canceled: tuple[Any, ...] | None = None
        self._loop = loop
        self._resume: Callable[[Any], Any] | None = None
        self._what = _NOTHING

    def __await__(self) -> Generator[Any, None, int]:
        self._asyncio_future_blocking = True
        yield self
        return self.result()

    def resume(self, what: int) -> bool:
        """Continue the task with this. Return False if it does not wait any longer."""
        resume, self._resume = self._resume, None
        if resume is None:
            return False
        self._what = what
        self._context.run(resume, self)
        return True

    # What a task calls.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, callback: Callable[[Any], Any], *, context: Context) -> None:
        self._resume, self._context = callback, context

    def cancel(self, msg: Any = None) -> bool:
        resume, self._resume = self._resume, None
        if resume is None:
            return False
        self._canceled = () if msg is None else (msg,)
        self._loop.call_soon(resume, self, context=self._context)
        return True

    def result(self) -> int:
        if self._canceled is not None:
            raise asyncio.CancelledError(*self._canceled)
        return self._what


class _Continued:
    """A generator of `psycopg` that has begun, for its own wait to go on with, after this interrupt if there is one."""

    def __init__(self, gen: Any, state: Any, interrupt: BaseException | None = None) -> None:
        self._gen = gen
        self._state = state
        self._interrupt = interrupt

    def __next__(self) -> Any:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt
        return self._state

    def send(self, ready: Any) -> Any:
        self._state = self._gen.send(ready)
        return self._state
