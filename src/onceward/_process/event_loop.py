"""The event loop of a worker's `async def` consumers: that of uvloop if it is installed, otherwise asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def run_in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, in an event loop of its own."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        runner.run(work)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    return new_event_loop
