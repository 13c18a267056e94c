"""NATS JetStream as a wire: one stream, one durable pull consumer, leases by its ack wait. Needs `onceward[nats]`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceward.connectors.jetstream.connector import JetStreamConnector
    from onceward.connectors.jetstream.connector_asyncio import AsyncJetStreamConnector

__all__ = ["AsyncJetStreamConnector", "JetStreamConnector"]


def __getattr__(name: str) -> Any:
    """Load the connectors on first use: the scheme next to them does not need the driver."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "connector_asyncio" if name.startswith("Async") else "connector"
    return getattr(import_module(f"{__name__}.{home}"), name)
