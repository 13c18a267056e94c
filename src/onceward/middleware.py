"""Middleware: code that wraps a task's source or its steps.

A middleware is written once, as coroutines, and works in threads and in asyncio: in threads `await call(…)` runs the
rest of the chain before it returns. So a middleware may await the calls it wraps, coroutines built on them, and
`sleep` below; anything that needs an event loop works in asyncio only.

The chain of a consumer, outermost first:

    telemetry ─► I/O guard ─► yours ─► failure rules ─► inbox ─► progress ─► dead letters ─► your handler, or the
    connector

A limited consumer has one before the inbox, around its handler, and one before the dead letters, around its source.

`onceward explain --verbose` prints it for each consumer. A middleware that wraps nothing costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.task.groups.together import Grouping
    from onceward.transaction import Settlement, Transaction

StepCall = Callable[..., Coroutine[Any, Any, Any]]
"""One attempt at a step: `await call(transaction, …)`. If it raises, the attempt has failed."""


class StepInfo(Protocol):
    """The step a middleware wraps."""

    @property
    def name(self) -> str:
        """`process` or `produce`, `success`, `exception`."""
        ...

    @property
    def max_attempts(self) -> int: ...
    @property
    def timeout(self) -> float | None: ...


class SourceCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls the engine makes to a source."""

    connector: Any
    fetch: Callable[..., Awaitable[Sequence[Transaction]]]
    """`await fetch(size)` returns at most `size` transactions."""
    settle: Callable[[Sequence[Settlement]], Awaitable[None]] | None = None
    """None if the source does not settle; likewise `extend`."""
    extend: Callable[[Sequence[Transaction]], Awaitable[None]] | None = None
    wait: Callable[[float], Awaitable[bool]] | None = None
    """`await wait(seconds)` after an empty fetch: see `onceward.connectors.base`. None if the source cannot wait."""
    ask: Callable[..., Awaitable[Any]]
    """`await ask("collect", 10)` calls any other method of the connector, by its name in threads."""
    lease: float = inf
    """Seconds until a delivery that is neither settled nor extended is redelivered."""

    def replace(self, **changes: Any) -> SourceCalls:
        """Return a copy with other calls: `source.replace(fetch=count_fetches)`."""
        return msgspec.structs.replace(self, **changes)


class Middleware:
    """Subclass it and override what you need. One instance serves every call of every task that lists it."""

    name: str = ""
    """Shown by `onceward explain --verbose`; defaults to the class name."""
    keeps_contract: ClassVar[bool] = False
    """Whether this middleware is an inbox, which keeps the contract of a task."""
    grouping: Grouping | None = None
    """How an inbox decides several attempts together; None if it decides each by itself."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name") or cls.__name__

    def bind(self, task: Any) -> Middleware:
        """Called when a task begins a call. If you keep state, return a copy for this call."""
        return self

    async def begin(self) -> None:
        """Called before the first fetch. If it raises, the call does not start and the caller gets the error."""

    async def end(self) -> None:
        """Called after everything else, also if the call failed. Errors are logged."""

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        """Return the calls the engine makes instead: `return source.replace(fetch=…)`."""
        return source

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        """Return what the engine calls instead of `call`, once per attempt. Return `call` to leave a step alone."""
        return call


def check_middleware(given: Sequence[Any], owner: str) -> tuple[Middleware, ...]:
    """Return the middleware of a task or an app as a tuple, or raise ConfigurationError."""
    for each in given:
        if not isinstance(each, Middleware):
            raise ConfigurationError(
                f"the middleware of {owner} must be instances of Middleware, not {each!r}; write middleware=[Audit()]"
            )
    return tuple(given)


async def sleep(seconds: float) -> None:
    """Wait, in threads as well as in asyncio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        time.sleep(seconds)
    else:
        await asyncio.sleep(seconds)
