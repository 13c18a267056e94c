"""`boundary+http://…`: connectors that own their client, and close it."""

from __future__ import annotations

from typing import Any

from onceward.boundary.client.client import BoundaryClient
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.tls import Tls
from onceward.connectors.boundary.connector import OwningBoundaryConnector
from onceward.connectors.boundary.connector_asyncio import AsyncOwningBoundaryConnector


def open_boundary(
    url: str, consumer: str | None, tls: dict[str, str], settings: dict[str, Any], *, asynchronous: bool
) -> Any:
    files = Tls(**tls) if tls else None
    if asynchronous:
        return AsyncOwningBoundaryConnector(AsyncBoundaryClient(url, tls=files), consumer, **settings)
    return OwningBoundaryConnector(BoundaryClient(url, tls=files), consumer, **settings)
