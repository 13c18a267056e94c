"""A boundary as a source and sink of the engine. Needs `onceward[boundary]`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceward.connectors.boundary.connector import AsyncBoundaryConnector, BoundaryConnector

__all__ = ["AsyncBoundaryConnector", "BoundaryConnector"]


def __getattr__(name: str) -> Any:
    """Load the connectors on first use: the scheme beside them needs no driver."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onceward.connectors.boundary import connector

    return getattr(connector, name)
