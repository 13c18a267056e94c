"""One seam for everything that goes around a task's source or its steps.

A middleware is written once, as coroutines, and works in threads and in asyncio: in threads `await call(…)` runs the
rest of the chain to its end before it returns. So a middleware may await what it was given, other coroutines built on
that, and `sleep` below; anything that needs an event loop works in asyncio only.

The chain of a consumer, outermost first:

    telemetry ─► I/O guard ─► yours ─► inbox ─► progress ─► dead letters ─► your handler, or the connector

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
    from onceward.transaction import Settlement, Transaction

StepCall = Callable[..., Coroutine[Any, Any, Any]]
"""One attempt at a step: `await call(transaction, …)`. What it raises is the failure of the attempt."""


class StepInfo(Protocol):
    """The step that is wrapped."""

    @property
    def name(self) -> str:
        """`process` or `produce`, `success`, `exception`."""
        ...

    @property
    def max_attempts(self) -> int: ...
    @property
    def timeout(self) -> float | None: ...


class SourceCalls(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine asks of a source."""

    connector: Any
    fetch: Callable[..., Awaitable[Sequence[Transaction]]]
    """`await fetch(size)`: transactions, at most `size`."""
    settle: Callable[[Sequence[Settlement]], Awaitable[None]] | None = None
    """None where the source has nothing to settle. So for `extend`."""
    extend: Callable[[Sequence[Transaction]], Awaitable[None]] | None = None
    ask: Callable[..., Awaitable[Any]]
    """`await ask("collect", 10)`: any other method of the connector, by the name it has in threads."""
    lease: float = inf
    """Seconds until a delivery that is neither settled nor extended comes again."""

    def replace(self, **changes: Any) -> SourceCalls:
        """A copy with other calls, such as `source.replace(fetch=counted)`."""
        return msgspec.structs.replace(self, **changes)


class Middleware:
    """Derive from it, and override what you need. One instance serves all calls of all tasks it is given to."""

    name: str = ""
    """What `onceward explain --verbose` calls it; the name of its class unless you give another."""
    keeps_contract: ClassVar[bool] = False
    """Whether it is what keeps the contract of a task: an inbox."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name") or cls.__name__

    def bind(self, task: Any) -> Middleware:
        """Called when a task begins a call. Return a copy that belongs to this call, if you keep state."""
        return self

    async def begin(self) -> None:
        """Called before the first fetch. What it raises refuses the whole call."""

    async def end(self) -> None:
        """Called after everything else, also when the call failed. What it raises is logged."""

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        """What the engine shall ask instead: `return source.replace(fetch=…)`."""
        return source

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        """What the engine shall call instead of `call`, once for each attempt. Return `call` to leave a step alone."""
        return call


def check_middleware(given: Sequence[Any], owner: str) -> tuple[Middleware, ...]:
    """What a task or an app was given, or an error that says how to write it."""
    for each in given:
        if not isinstance(each, Middleware):
            raise ConfigurationError(
                f"the middleware of {owner} must be instances of Middleware, not {each!r}; write middleware=[Audit()]"
            )
    return tuple(given)


async def sleep(seconds: float) -> None:
    """Wait in a middleware, in either mode."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        time.sleep(seconds)
    else:
        await asyncio.sleep(seconds)
