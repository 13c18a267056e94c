"""Who may call a boundary, and what each peer may do: a table from certificate identities to zones.

A server with TLS checks the table before every call. Identities are compared exactly; one that is not in the table is
refused. The peer's certificate is in a context variable, because the calls in between do not pass it on.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from connectrpc.request import RequestContext

from onceward.boundary.errors import BoundaryError, PermissionDenied, Unauthenticated
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.server.codecs import refusal
from onceward.boundary.v1 import boundary_pb as pb
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from cryptography import x509

_log = OwnLogger(logging.getLogger("onceward.boundary"))

CERTIFICATE_HEADER = b"x-forwarded-client-cert"
"""Envoy removes what a peer sends in it, and puts the peer's verified certificate there."""

OPEN_TO_PEERS = (pb.PutObjectRequest, pb.GetObjectRequest, pb.AppendFactsRequest)
"""Requests that every known peer may make. One that neither this nor `Guard.check` names is refused. Each of several
facts is checked as it is taken."""

REQ = TypeVar("REQ")
RES = TypeVar("RES")


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    identity: str
    """The common name in its certificate's subject, or a DNS name or URI among the alternative names."""
    zone: str
    from_zones: tuple[str, ...] | None = None
    """Zones that the facts it appends may come from. Its own zone by default; a relay has several."""
    to_zones: tuple[str, ...] = ()
    """Zones that the facts it appends may go to."""
    consumers: tuple[str, ...] = ()
    """Consumer names reserved for the peers that list them. A name that no peer lists is open to all."""

    @property
    def origins(self) -> tuple[str, ...]:
        return (self.zone,) if self.from_zones is None else self.from_zones


class Certificate:
    """A peer's certificate, verified by the CA."""

    def __init__(self, names: tuple[str, ...], ends_at: float, address: str) -> None:
        self.names = names
        self.ends_at = ends_at
        self.address = address

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Self:
        """Return that of the peer who made a request. Envoy has verified it and put it into a header."""
        shown = next(value for name, value in scope["headers"] if name == CERTIFICATE_HEADER)
        host, port = scope["client"]
        return cls(*_read(shown), f"{host}:{port}")

    def __str__(self) -> str:
        return f"the certificate of {', '.join(map(repr, self.names)) or 'no one'}"


CERTIFICATE: ContextVar[Certificate] = ContextVar("certificate of the peer")
"""Set for a request before anything of it is read."""


class Peers:
    """The table. It is checked on every call, so a removed peer is refused at once."""

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

    def identify(self, certificate: Certificate) -> Peer:
        """Return the peer that owns the certificate. Raise `Unauthenticated` if there is none."""
        if certificate.ends_at < time.time():
            raise Unauthenticated("expired", f"{certificate} has expired")
        found = [self._table[name] for name in certificate.names if name in self._table]
        if not found:
            raise Unauthenticated(
                "unknown_identity", f"{certificate} does not belong to a peer of this boundary"
            )
        if len(found) > 1:
            raise Unauthenticated(
                "ambiguous_identity",
                f"{certificate} belongs to several peers of this boundary; keep one of them",
            )
        return found[0]

    def check_zones(self, peer: Peer, from_zone: str, to_zone: str) -> None:
        """Raise `PermissionDenied` unless the peer may append a fact from and for these zones."""
        if from_zone not in peer.origins:
            problem = f"{peer.identity!r} may not append facts from zone {from_zone!r:.80}"
            raise PermissionDenied("from_zone", problem, "envelope.from_zone")
        if to_zone not in peer.to_zones:
            problem = f"{peer.identity!r} may not append facts for zone {to_zone!r:.80}"
            raise PermissionDenied("to_zone", problem, "envelope.to_zone")

    def check_consumer(self, peer: Peer, name: str) -> None:
        """Raise `PermissionDenied` for a name that is reserved for other peers."""
        if peer.identity not in self._owners.get(name, (peer.identity,)):
            raise PermissionDenied(
                "consumer",
                f"{peer.identity!r} may not use the consumer name {name!r}, which is reserved for another peer",
                "consumer_name",
            )


class Guard:
    """An interceptor that checks every call. A request is read completely before it is refused: a client that is still
    sending does not read."""

    def __init__(self, peers: Peers, metrics: BoundaryMetrics) -> None:
        self._peers = peers
        self._metrics = metrics

    def check(self, what: str, request: Any = None) -> None:
        """Raise `Unauthenticated`, or `PermissionDenied` if the peer may not make this call."""
        certificate = CERTIFICATE.get()
        try:
            peer = self._peers.identify(certificate)
            if isinstance(request, pb.AppendFactRequest):
                if request.envelope is not None:  # without one, the call itself is refused as invalid
                    self._peers.check_zones(peer, request.envelope.from_zone, request.envelope.to_zone)
            elif isinstance(
                request, pb.FetchFactsRequest | pb.ConfirmReceiptRequest | pb.RemoveConsumerRequest
            ):
                self._peers.check_consumer(peer, request.consumer_name)
            elif request is not None and not isinstance(request, OPEN_TO_PEERS):
                raise PermissionDenied("no_rule", f"no rule allows {what} to a peer")
        except BoundaryError as error:
            self._metrics.auth_failures.labels(error.reason).inc()
            fields = {"outcome": error.code}
            _log.warning("%s from %s refused: %s", what, certificate.address, error, extra=fields)
            raise

    async def intercept_unary(
        self,
        call_next: Callable[[REQ, RequestContext[Any, Any]], Awaitable[RES]],
        request: REQ,
        ctx: RequestContext[Any, Any],
        /,
    ) -> RES:
        self.check_call(ctx.method.name, request)
        return await call_next(request, ctx)

    async def intercept_client_stream(
        self,
        call_next: Callable[[AsyncIterator[REQ], RequestContext[Any, Any]], Awaitable[RES]],
        request: AsyncIterator[REQ],
        ctx: RequestContext[Any, Any],
        /,
    ) -> RES:
        try:
            self.check_call(ctx.method.name)
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
        self.check_call(ctx.method.name, request)
        async for answer in call_next(request, ctx):
            yield answer

    def check_call(self, what: str, request: Any = None) -> None:
        """`check`, with the error that the caller gets."""
        try:
            self.check(what, request)
        except BoundaryError as error:
            raise refusal(error) from None


@lru_cache(1024)
def _read(shown: bytes) -> tuple[tuple[str, ...], float]:
    """Return a certificate's names, and when it expires. A connection shows the same one with each request."""
    from cryptography import x509

    [pem] = re.findall(rb'(?:^|;)Cert="([^"]*)"', shown)
    certificate = x509.load_pem_x509_certificate(unquote_to_bytes(pem))
    return tuple(dict.fromkeys(_names(certificate))), certificate.not_valid_after_utc.timestamp()


def _names(certificate: x509.Certificate) -> Iterable[str]:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME):
        yield str(each.value)
    try:
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return
    for each in others:
        if isinstance(each, x509.DNSName | x509.UniformResourceIdentifier):
            yield each.value
