"""Code of a handler that has not run when the handler returns: coroutines that it never awaits, and async generators
that it leaves before their end.

The code of such a coroutine has not run, so the attempt must not succeed. CPython reports such a coroutine to
`warnings._warn_unawaited_coroutine` when it is dropped. That happens where the last reference goes away: on the line
that creates it, or when the handler's frame ends, which is before the commit. So the context in which it is dropped
tells the attempt. The garbage collector drops things anywhere, and a log handler may let go of an older traceback:
about what these drop there is only Python's own warning.

An async generator that is left, as by `break`, has its `finally` still to run. The event loop does that in a task of
its own, when it can, which may be after the commit. So `ending` waits for these tasks.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar

from onceward.task.exceptions import unawaited_error
from onceward.telemetry.context import current_work

T = TypeVar("T")

_PACKAGE = str(Path(__file__).parent)
_seen: ContextVar[list[str] | None] = ContextVar("onceward_unawaited", default=None)
"""The unawaited coroutines of the handler that runs here, inside a session."""
_left: ContextVar[_Left | None] = ContextVar("onceward_left", default=None)
"""The async generators that the handler leaves that runs here, inside a session."""
_collecting: int | None = None
"""The thread in which the garbage collector runs."""
_warn: Any = None
"""Python's own function, once ours is in its place."""


def watch_coroutines() -> None:
    """Notice coroutines that are never awaited, in this process from now on."""
    global _warn
    if _warn is None and hasattr(warnings, "_warn_unawaited_coroutine"):
        _warn = warnings._warn_unawaited_coroutine
        warnings._warn_unawaited_coroutine = _dropped
        gc.callbacks.append(_collect)


class all_awaited:
    """Raise `UnawaitedError` at the end of the block if it created a coroutine and did not await it. Used as a
    function; a generator would take three times as long."""

    __slots__ = ("_list", "_token")

    def __enter__(self) -> None:
        if _warn is None:
            watch_coroutines()
        self._list: list[str] = []
        self._token = _seen.set(self._list)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _seen.reset(self._token)
        if error is None and self._list:
            raise unawaited_error(self._list)


class _Left:
    """The async generators that one handler has left."""

    __slots__ = ("over", "waiting")

    def __init__(self) -> None:
        self.over = False
        """Nobody waits any more."""
        self.waiting: list[asyncio.Future[None]] = []

    async def end(self) -> None:
        """Wait until they have ended, with those that they leave. Raises the first error."""
        while self.waiting:
            waiting, self.waiting = self.waiting, []
            found = await asyncio.gather(*waiting, return_exceptions=True)
            for error in filter(None, found):
                raise error


class _Finalizer:
    """Python calls it with an async generator that nobody refers to any more, instead of the event loop's own."""

    __slots__ = ("_loop", "_loops_own")

    def __init__(self, loop: asyncio.AbstractEventLoop, loops_own: Callable[[Any], Any]) -> None:
        self._loop = loop
        self._loops_own = loops_own

    def __call__(self, generator: AsyncGenerator[Any, Any]) -> None:
        left = _left.get()
        if left is None or left.over or _collecting == get_ident() or self._loop.is_closed():
            self._loops_own(generator)
            return
        ended: asyncio.Future[None] = self._loop.create_future()
        left.waiting.append(ended)
        # As the event loop does it: later, because this can be anywhere, also in another thread.
        self._loop.call_soon_threadsafe(self._begin, generator, ended)

    def _begin(self, generator: AsyncGenerator[Any, Any], ended: asyncio.Future[None]) -> None:
        self._loop.create_task(_close(generator, ended))


async def _close(generator: AsyncGenerator[Any, Any], ended: asyncio.Future[None]) -> None:
    try:
        await generator.aclose()
    except BaseException as error:
        if not isinstance(error, Exception):
            ended.cancel()
            raise
        if not ended.done():
            ended.set_exception(error)
    else:
        if not ended.done():
            ended.set_result(None)


async def ending(call: Awaitable[T]) -> T:
    """What a handler for asyncio returns, once the async generators have ended that it left: what they write then is
    part of its transaction, and their errors are its errors."""
    hooks = sys.get_asyncgen_hooks()
    if hooks.finalizer is None:  # in a thread, without an event loop
        return await call
    if type(hooks.finalizer) is not _Finalizer:  # once per run of an event loop
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the hook of another framework
            return await call
        sys.set_asyncgen_hooks(finalizer=_Finalizer(loop, hooks.finalizer))
    left = _Left()
    token = _left.set(left)
    try:
        result = await call
        if left.waiting:
            await left.end()
        return result
    except Exception:
        await asyncio.gather(*left.waiting, return_exceptions=True)  # they use the session until then
        raise
    finally:
        left.over = True
        _left.reset(token)


def _collect(phase: str, _: dict[str, int]) -> None:
    global _collecting
    _collecting = get_ident() if phase == "start" else None


def _dropped(coroutine: Any) -> None:
    """Called by CPython when it finalizes a coroutine that has not started."""
    frame = sys._getframe().f_back
    if _collecting != get_ident() and not _is_logging(frame):
        seen = _seen.get()
        work: Any = current_work.get()
        if seen is not None:
            seen.append(_describe(coroutine, frame))
        elif getattr(work, "unawaited", None) is not None:
            work.unawaited = [*work.unawaited, _describe(coroutine, frame)]
    _warn(coroutine)


def _is_logging(frame: FrameType | None) -> bool:
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "logging"


def _describe(coroutine: Any, frame: FrameType | None) -> str:
    """The function, and the line that dropped it; if that is not the user's, the line where the function is defined."""
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    if frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        return f"{name}(…) at {frame.f_code.co_filename}:{frame.f_lineno}"
    code = coroutine.cr_code
    if code.co_filename.startswith(_PACKAGE):
        return f"{name}(…)"
    return f"{name}(…), defined at {code.co_filename}:{code.co_firstlineno},"
