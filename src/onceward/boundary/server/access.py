"""Asks the table of peers before every call, in a server whose connections have certificates.

Whose connection a call came by is in a context variable, because the protocols between them do not hand it on.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec
from connectrpc.request import RequestContext

from onceward.boundary.errors import BoundaryError, PermissionDenied, Unauthenticated
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.server.codecs import refusal
from onceward.boundary.v1 import boundary_pb as pb
from onceward.errors import ConfigurationError

# Who may call a boundary, and what each of them may say: a table from certificate identities to zones.
#
# Identities are compared as they are, letter by letter. One that is not in the table is nobody.


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    identity: str
    """The common name of its certificate's subject, or a DNS name or URI among its alternative names."""
    zone: str
    from_zones: tuple[str, ...] | None = None
    """Where the facts that it appends may come from. Its own zone alone, unless more is said: a relay has several."""
    to_zones: tuple[str, ...] = ()
    """Where the facts that it appends may go to."""
    consumers: tuple[str, ...] = ()
    """Names that nobody else may fetch and confirm as. A name that is in no peer's list is everybody's."""

    @property
    def origins(self) -> tuple[str, ...]:
        return (self.zone,) if self.from_zones is None else self.from_zones


class Certificate:
    """What a peer has shown, and its CA has vouched for."""

    def __init__(self, shown: Mapping[str, Any], address: str) -> None:
        """`shown` is what `ssl.SSLSocket.getpeercert` returns."""
        self.address = address
        self.names = tuple(dict.fromkeys(_names(shown)))
        self.ends_at = float(ssl.cert_time_to_seconds(shown["notAfter"]))

    def __str__(self) -> str:
        return f"the certificate of {', '.join(map(repr, self.names)) or 'nobody'}"


class Peers:
    """The table. It is asked for every call, so that whoever is taken out of it is refused at once."""

    def __init__(self, peers: Iterable[Peer] = ()) -> None:
        self.replace(peers)

    def replace(self, peers: Iterable[Peer]) -> None:
        table: dict[str, Peer] = {}
        owners: dict[str, set[str]] = {}
        for peer in peers:
            if peer.identity in table:
                raise ConfigurationError(f"two peers have the identity {peer.identity!r}; make them one")
            table[peer.identity] = peer
            for name in peer.consumers:
                owners.setdefault(name, set()).add(peer.identity)
        self._table, self._owners = table, owners

    def known(self, certificate: Certificate) -> Peer:
        """Raises `Unauthenticated`."""
        if certificate.ends_at < time.time():
            raise _refused(Unauthenticated, "expired", f"{certificate} has expired meanwhile")
        found = [self._table[name] for name in certificate.names if name in self._table]
        if not found:
            raise _refused(
                Unauthenticated, "unknown_identity", f"{certificate} is that of no peer of this boundary"
            )
        if len(found) > 1:
            raise _refused(
                Unauthenticated,
                "ambiguous_identity",
                f"{certificate} is that of several peers of this boundary; leave one of them",
            )
        return found[0]

    def check_zones(self, peer: Peer, from_zone: str, to_zone: str) -> None:
        """Raises `PermissionDenied` unless the peer may append a fact of and for these."""
        if from_zone not in peer.origins:
            raise _refused(
                PermissionDenied,
                "from_zone",
                f"{peer.identity!r} may not append facts from zone {from_zone!r}",
                "envelope.from_zone",
            )
        if to_zone not in peer.to_zones:
            raise _refused(
                PermissionDenied,
                "to_zone",
                f"{peer.identity!r} may not append facts for zone {to_zone!r}",
                "envelope.to_zone",
            )

    def check_consumer(self, peer: Peer, name: str) -> None:
        """Raises `PermissionDenied` for a name that is bound to others."""
        if peer.identity not in self._owners.get(name, (peer.identity,)):
            raise _refused(
                PermissionDenied,
                "consumer",
                f"{peer.identity!r} may not fetch or confirm as {name!r}, which is another peer's name",
                "consumer_name",
            )


def _names(shown: Mapping[str, Any]) -> Iterable[str]:
    for part in shown.get("subject", ()):
        yield from (value for kind, value in part if kind == "commonName")
    yield from (value for kind, value in shown.get("subjectAltName", ()) if kind in ("DNS", "URI"))


def _refused(kind: type[BoundaryError], reason: str, words: str, field: str = "") -> BoundaryError:
    made = kind(words)
    made.reason, made.field = reason, field
    return made


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
