"""A boundary as a source and sink of the engine. Needs `onceward[boundary]`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceward.connectors.boundary.connector import BoundaryConnector
    from onceward.connectors.boundary.connector_asyncio import AsyncBoundaryConnector

__all__ = ["AsyncBoundaryConnector", "BoundaryConnector"]


def __getattr__(name: str) -> Any:
    """Load the connectors on first use: the scheme needs no driver."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "connector_asyncio" if name.startswith("Async") else "connector"
    return getattr(import_module(f"{__name__}.{home}"), name)
