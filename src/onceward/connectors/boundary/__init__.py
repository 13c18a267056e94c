"""A boundary as a source and sink of the engine."""

from onceward.connectors.boundary.connector import BoundaryConnector
from onceward.connectors.boundary.connector_asyncio import AsyncBoundaryConnector

__all__ = ["AsyncBoundaryConnector", "BoundaryConnector"]
