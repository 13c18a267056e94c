"""A boundary as a source and sink of the engine."""

from onceward.connectors.boundary.connector import AsyncBoundaryConnector, BoundaryConnector

__all__ = ["AsyncBoundaryConnector", "BoundaryConnector"]
