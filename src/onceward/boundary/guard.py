"""Asks the table of peers before every call, in a server whose connections have certificates.

Whose connection a call came by is in a context variable, because the protocols between them do not hand it on.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from connectrpc.request import RequestContext

from onceward.boundary.codecs import refusal
from onceward.boundary.errors import BoundaryError
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.peers import Certificate, Peers
from onceward.boundary.v1 import boundary_pb as pb

_log = logging.getLogger("onceward.boundary")

CERTIFICATE: ContextVar[Certificate] = ContextVar("certificate of the peer")
"""Set for a connection, before anything that comes by it is looked at."""

REQ = TypeVar("REQ")
RES = TypeVar("RES")


class Guard:
    """An interceptor of calls. It lets a request be read before it is refused: whoever is still sending does not
    listen."""

    def __init__(self, peers: Peers, metrics: BoundaryMetrics) -> None:
        self._peers = peers
        self._metrics = metrics

    def check(self, what: str, request: Any = None) -> None:
        """Raises `Unauthenticated`, or `PermissionDenied` if the peer may not ask this."""
        certificate = CERTIFICATE.get()
        try:
            peer = self._peers.known(certificate)
            if isinstance(request, pb.AppendFactRequest) and request.envelope is not None:
                self._peers.check_zones(peer, request.envelope.from_zone, request.envelope.to_zone)
            elif isinstance(request, pb.FetchFactsRequest | pb.ConfirmReceiptRequest):
                self._peers.check_consumer(peer, request.consumer_name)
        except BoundaryError as error:
            self._metrics.auth_failures.labels(error.reason).inc()
            told = {"outcome": error.code}
            _log.warning("%s by %s refused: %s", what, certificate.address, error, extra=told)
            raise

    async def intercept_unary(
        self,
        call_next: Callable[[REQ, RequestContext[Any, Any]], Awaitable[RES]],
        request: REQ,
        ctx: RequestContext[Any, Any],
        /,
    ) -> RES:
        self._check_call(ctx, request)
        return await call_next(request, ctx)

    async def intercept_client_stream(
        self,
        call_next: Callable[[AsyncIterator[REQ], RequestContext[Any, Any]], Awaitable[RES]],
        request: AsyncIterator[REQ],
        ctx: RequestContext[Any, Any],
        /,
    ) -> RES:
        try:
            self._check_call(ctx)
        except Exception:
            async for _ in request:
                pass
            raise
        return await call_next(request, ctx)

    async def intercept_server_stream(
        self,
        call_next: Callable[[REQ, RequestContext[Any, Any]], AsyncIterator[RES]],
        request: REQ,
        ctx: RequestContext[Any, Any],
        /,
    ) -> AsyncIterator[RES]:
        self._check_call(ctx, request)
        async for answer in call_next(request, ctx):
            yield answer

    def _check_call(self, ctx: RequestContext[Any, Any], request: Any = None) -> None:
        try:
            self.check(ctx.method.name, request)
        except BoundaryError as error:
            raise refusal(error) from None
