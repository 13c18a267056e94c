"""Things of two modes, called alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any


class Driven:
    """Its methods are those of the thing; what they return is run to its end by `run` if it is awaitable, and an
    asynchronous generator is an iterator."""

    def __init__(self, thing: Any, run: Callable[[Any], Any]) -> None:
        self.thing = thing
        self._run = run

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.thing, name)
        return lambda *args, **more: self.ended(method(*args, **more))

    def ended(self, result: Any) -> Any:
        if inspect.isasyncgen(result):
            return self._iterated(result)
        return self._run(result) if inspect.isawaitable(result) else result

    def _iterated(self, generator: Any) -> Iterator[Any]:
        while True:
            try:
                yield self._run(generator.__anext__())
            except StopAsyncIteration:
                return
