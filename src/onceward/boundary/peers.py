"""Who may call a boundary, and what each of them may say: a table from certificate identities to zones.

Identities are compared as they are, letter by letter. One that is not in the table is nobody.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from onceward.boundary.errors import BoundaryError, PermissionDenied, Unauthenticated
from onceward.errors import ConfigurationError


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
