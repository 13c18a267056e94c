"""`boundary+http://…`: connectors that close the client which was made for them."""

from __future__ import annotations

from typing import Any

from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.tls import Tls
from onceward.connectors.boundary import AsyncBoundaryConnector, BoundaryConnector


class _Own(BoundaryConnector):
    def close(self) -> None:
        super().close()
        self._client.close()


class _AsyncOwn(AsyncBoundaryConnector):
    async def close_async(self) -> None:
        await super().close_async()
        await self._client.close()


def open_boundary(
    url: str, consumer: str | None, tls: dict[str, str], settings: dict[str, Any], *, asynchronous: bool
) -> Any:
    files = Tls(**tls) if tls else None
    if asynchronous:
        return _AsyncOwn(AsyncBoundaryClient(url, tls=files), consumer, **settings)
    return _Own(BoundaryClient(url, tls=files), consumer, **settings)
