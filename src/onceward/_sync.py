"""How one text runs with threads and with asyncio.

Everything in this package that decides is a coroutine. What waits is a port: with asyncio it really awaits; with
threads it is an `async def` that blocks and returns. So with threads a coroutine never suspends, and one `send`
runs it to its end.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end a coroutine whose ports block."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    coroutine.close()
    raise RuntimeError("a port suspended where it should have blocked")
