"""What onceward itself sends and takes: nothing of it leaves a verification.

Sources, sinks and queues may be real and their connections inherited. So children replace the methods that use them: in
a handler they fail and are noted, in an effect a message counts as sent.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import FrameType
from typing import Any

from onceward.connectors.kept import kept
from onceward.connectors.memory import AsyncMemoryConnector, MemoryConnector
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.verify.watch import intrusions
from onceward.verify.watch.calls import record_messages

_TAKE = ("fetch_transactions", "settle_transactions", "extend_transactions", "release_owner", "forget_dead")
_CONNECTOR = ("dispatch_transactions", *_TAKE)
_ASYNC_CONNECTOR = tuple(f"{name}_async" for name in _CONNECTOR)
_QUEUE = ("enqueue", "read", "ack", "claim_stale")
_QUEUE_CONSUMER = ("next", "ack", "claim_stale", "run", "run_claim_stale")
_CLIENT = (
    "append", "append_until_durable", "append_with_artifact", "fetch", "confirm", "put", "put_stream", "put_file",
)  # fmt: skip
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "onceward.connectors.leases": {
        "LeasingConnector": _CONNECTOR,
        "AsyncLeasingConnector": _ASYNC_CONNECTOR,
    },
    "onceward.connectors.background": {"BackgroundConnector": _ASYNC_CONNECTOR},
    "onceward.connectors.postgresql.connector": {
        "PostgreSqlConnector": _CONNECTOR,
        "AsyncPostgreSqlConnector": _ASYNC_CONNECTOR,
    },
    "onceward.connectors.sqlite": {"SqliteConnector": _CONNECTOR, "AsyncSqliteConnector": _ASYNC_CONNECTOR},
    "onceward.connectors.redis_streams.connector": {"RedisStreamsConnector": _CONNECTOR},
    "onceward.connectors.redis_streams.connector_asyncio": {"AsyncRedisStreamsConnector": _ASYNC_CONNECTOR},
    "onceward.connectors.boundary.connector": {"BoundaryConnector": _CONNECTOR},
    "onceward.connectors.boundary.connector_asyncio": {"AsyncBoundaryConnector": _ASYNC_CONNECTOR},
    "onceward.queue.queue": {"RedisStreamsQueue": _QUEUE},
    "onceward.queue.queue_asyncio": {"AsyncRedisStreamsQueue": _QUEUE},
    "onceward.queue.consumer": {"QueueConsumer": _QUEUE_CONSUMER},
    "onceward.queue.consumer_asyncio": {"AsyncQueueConsumer": _QUEUE_CONSUMER},
    "onceward.boundary.client.client": {"BoundaryClient": _CLIENT},
    "onceward.boundary.client.client_asyncio": {"AsyncBoundaryClient": _CLIENT},
}
SENT = {"dispatch_transactions": None, "dispatch_transactions_async": None, "enqueue": "0-0"}
"""What a method returns in an effect, where its message counts as sent."""
HOW = (
    "A verification sends and takes no messages. Send in session.effect(…), where they count as sent, or pass a fake "
    "in services=…"
)
_classes: list[tuple[Any, tuple[str, ...]]] = []


class NotInVerificationError(ConfigurationError):
    """A verification sends nothing to real sinks and takes nothing from real sources."""


def preload() -> None:
    """Import everything that `install` replaces. In the parent, once for all children."""
    if _classes:
        return
    for name, methods in METHODS.items():
        try:
            module = import_module(name)
        except (ImportError, ConfigurationError):
            continue  # its extra is not installed, so the consumer cannot use it
        _classes.extend((getattr(module, kind), names) for kind, names in methods.items())


def install() -> None:
    """Send and take nothing from now on in this process."""
    preload()
    for kind, names in _classes:
        for name in names:
            if name in vars(kind):
                setattr(kind, name, _blocked(kind, name, vars(kind)[name]))
    open_real = Address.open

    def open_blocked(self: Address, *, asynchronous: bool) -> Any:
        what = f"sent messages to {self}" if self.sink else f"opened the source {self}"
        _refuse_in_steps(what, sys._getframe(1))
        if self.in_process:
            return open_real(self, asynchronous=asynchronous)
        if not intrusions.is_allowed() or not self.sink:
            raise NotInVerificationError(f"{what}. {HOW}")
        return _Unsent()

    Address.open = open_blocked  # type: ignore[method-assign]
    kept.keep_nothing()  # or what an effect may open, a handler would find open


def _blocked(kind: Any, name: str, real: Any) -> Any:
    what = f"called {kind.__name__}.{name}"

    def is_real(connector: Any, frame: FrameType) -> bool:
        """Whether to make the call. Memory is no outside world, and no other process sees it."""
        _refuse_in_steps(what, frame)
        if isinstance(connector, MemoryConnector | AsyncMemoryConnector):
            return True
        if not intrusions.is_allowed() or name not in SENT:
            raise NotInVerificationError(f"{what}. {HOW}")
        return False

    def call(self: Any, *args: Any, **more: Any) -> Any:
        if name in SENT:
            record_messages(*args[:1])
        return real(self, *args, **more) if is_real(self, sys._getframe(1)) else SENT[name]

    async def call_async(self: Any, *args: Any, **more: Any) -> Any:
        if name in SENT:
            record_messages(*args[:1])
        return await real(self, *args, **more) if is_real(self, sys._getframe(1)) else SENT[name]

    return call_async if inspect.iscoroutinefunction(real) else call


def _refuse_in_steps(what: str, frame: FrameType) -> None:
    if intrusions.is_watched():
        intrusions.note(what, frame, sends=True)
        raise NotInVerificationError(f"{what}. {HOW}")


class _Unsent:
    """Stands for a sink that an effect opens by its URL: what it gets counts as sent."""

    lease = 60.0

    def dispatch_transactions(self, transactions: Any, /) -> None:
        record_messages(transactions)

    async def dispatch_transactions_async(self, transactions: Any, /) -> None:
        record_messages(transactions)

    def close(self) -> None:
        pass

    async def close_async(self) -> None:
        pass
