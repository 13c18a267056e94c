"""A look at a stream and its consumer from outside, which changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from onceward._nats.connection import NatsUnavailable
from onceward._nats.wire import BlockingNatsWire
from onceward._secrets import mask
from onceward._sync import run_blocking
from onceward.connectors.jetstream.line import QueueLine
from onceward.connectors.jetstream.scheme import options_of, server_of
from onceward.connectors.reports import ServerUnreachable
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.connectors.urls import Address

T = TypeVar("T")


def inspect(address: Address, look: Callable[[QueueLine], Coroutine[Any, Any, T]]) -> T:
    """Return what `look` finds out over a connection. Raises `ServerUnreachable`."""

    async def connect_and_look() -> T:
        link = await QueueLine.connect(server_of(address), **options_of(address))
        try:
            return await look(link)
        finally:
            await link.close()

    try:
        return run_blocking(BlockingNatsWire().run(connect_and_look()))
    except (NatsUnavailable, ConfigurationError) as error:
        raise ServerUnreachable(mask(str(error))) from None
