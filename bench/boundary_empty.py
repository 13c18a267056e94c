"""What the server of a benchmark runs: the service with calls that do nothing, beside those that do."""

from __future__ import annotations

from typing import Any

from onceward.boundary.server import asgi
from onceward.boundary.server.codecs import ReadyPage
from onceward.boundary.server.rpc import BoundaryRpc
from onceward.boundary.server.worker import application
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.wire import page_bytes

__all__ = ["application"]

PAGE = 1000


class WithEmptyCalls(BoundaryRpc):
    """The service, with calls that do nothing: PutObject is empty, and one consumer gets a ready-made page."""

    _page: ReadyPage | None = None

    async def put_object(self, request: pb.PutObjectRequest, ctx: Any) -> pb.PutObjectResponse:
        return pb.PutObjectResponse()

    async def fetch_facts(self, request: pb.FetchFactsRequest, ctx: Any) -> Any:
        if request.consumer_name != "ready-made":
            return await super().fetch_facts(request, ctx)
        if self._page is None:
            self._page = ReadyPage(page_bytes(await self._boundary.store.read(0, PAGE), None))
        return self._page


asgi.BoundaryRpc = WithEmptyCalls  # type: ignore[attr-defined]
