"""Run coroutines in an event loop of their own, from threads and from asyncio.

The driver of NATS needs an event loop that is never blocked, or NATS takes its connection for dead. One loop, in a
thread, serves all connections of a process. It is started when it is first needed, and again in a process that was
forked.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from onceward._nats.connection import NatsUnavailable
from onceward._process.aside import SIGNAL_CHECK
from onceward._process.stop import LAST_WAIT, engine_stop

T = TypeVar("T")
Undo = Callable[[T], Coroutine[Any, Any, None]]

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def nats_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="onceward-nats", daemon=True).start()
        return _loop


def _forget_loop() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)


class BlockingNatsWire:
    """For threads: waits for the result."""

    async def run(
        self, work: Coroutine[Any, Any, T], end: Callable[[], None] | None = None, undo: Undo[T] | None = None
    ) -> T:
        """Return the result of `work`. A stop of the engine calls `end`, in the loop, and leaves `LAST_WAIT` seconds.
        `undo` gets a result that nobody waits for any more."""
        loop, stop = nats_loop(), engine_stop()
        future = asyncio.run_coroutine_threadsafe(work, loop)
        mail: SimpleQueue[Future[T] | None] = SimpleQueue()
        future.add_done_callback(mail.put)
        until: float | None = None
        with ExitStack() as watched:
            if stop is not None:
                watched.enter_context(stop.calling(partial(mail.put, None)))
                if stop.requested:
                    mail.put(None)
            try:
                while True:
                    try:
                        got = mail.get(
                            timeout=SIGNAL_CHECK if until is None else max(until - monotonic(), 0.0)
                        )
                    except Empty:
                        if until is not None:
                            future.cancel()
                            raise _out_of_time() from None
                        continue
                    if got is not None:
                        return got.result()
                    until = until or monotonic() + LAST_WAIT
                    if end is not None:
                        loop.call_soon_threadsafe(end)
            except BaseException:
                if not future.done():
                    _leave(future, loop, end, undo)
                raise


class AsyncNatsWire:
    """For asyncio: awaits the result, in any event loop."""

    async def run(
        self, work: Coroutine[Any, Any, T], end: Callable[[], None] | None = None, undo: Undo[T] | None = None
    ) -> T:
        """As `BlockingNatsWire.run`. If it is canceled, the work goes on to its end."""
        loop, stop = nats_loop(), engine_stop()
        future = asyncio.run_coroutine_threadsafe(work, loop)
        result = asyncio.wrap_future(future)
        result.add_done_callback(_mark_retrieved)
        limit = asyncio.timeout(None)

        def hasten() -> None:
            if limit.when() is None:
                limit.reschedule(asyncio.get_running_loop().time() + LAST_WAIT)
            if end is not None:
                loop.call_soon_threadsafe(end)

        try:
            async with limit:
                with ExitStack() as watched:
                    if stop is not None:
                        watched.enter_context(stop.calling(hasten))
                        if stop.requested:
                            hasten()
                    return await asyncio.shield(result)
        except TimeoutError:
            if not limit.expired():
                raise
            future.cancel()
            raise _out_of_time() from None
        except asyncio.CancelledError:
            _leave(future, loop, end, undo)
            if undo is not None:
                await asyncio.wait([result])  # short, since its wait has ended
            raise


def _leave(
    future: Future[T],
    loop: asyncio.AbstractEventLoop,
    end: Callable[[], None] | None,
    undo: Undo[T] | None,
) -> None:
    """End the work early if it can be, and give its result to `undo`."""
    if end is not None:
        loop.call_soon_threadsafe(end)

    def pass_on(done: Future[T]) -> None:
        if undo is not None and not done.cancelled() and done.exception() is None:
            asyncio.run_coroutine_threadsafe(undo(done.result()), loop)

    future.add_done_callback(pass_on)


def _mark_retrieved(result: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an error that nobody waits for any more."""
    if not result.cancelled():
        result.exception()


def _out_of_time() -> NatsUnavailable:
    return NatsUnavailable(f"NATS did not answer within {LAST_WAIT:g} s of stop()")
