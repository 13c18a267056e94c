"""Calling a boundary that is away for a while, as its clients do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from onceward.boundary.errors import Unavailable
from tests.support.wait import retry_async

T = TypeVar("T")


async def until_available(call: Callable[[], Awaitable[T]]) -> T:
    """Again and again while it is unavailable, with the same id."""
    return await retry_async(call, Unavailable)
