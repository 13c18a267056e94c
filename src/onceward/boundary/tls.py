"""TLS 1.3 with a certificate on both sides: the files of it, a server's context that can be replaced, and what is said
about a handshake that failed."""

from __future__ import annotations

import logging
import os
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.boundary.metrics import BoundaryMetrics

_log = logging.getLogger("onceward.boundary")

Path = str | os.PathLike[str]
DAY = 86400.0
WARN_BEFORE = 30 * DAY
"""Seconds before the end of a certificate from which on it is worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Three files in PEM, of a server or of a client."""

    ca: Path
    """Whose signature makes the other side's certificate good."""
    cert: Path
    """What is shown to the other side; with what lies between it and its CA, if anything does."""
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """CA, certificate and key."""
        return _read(self.ca, "ca"), _read(self.cert, "cert"), _read(self.key, "key")


def client_context(files: Tls) -> ssl.SSLContext:
    """For Python's own HTTP client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, files)
    return context


class ServerTls:
    """What the next handshake of a server uses. Connections that stand are not touched by a change of it."""

    def __init__(self, files: Tls, metrics: BoundaryMetrics) -> None:
        self._metrics = metrics
        self.load(files)

    def load(self, files: Tls) -> None:
        """Raises `ConfigurationError` if a file cannot be used; then all stays as it was."""
        context = _server_context(files)
        own, trusted = _ends(files.cert)[0], max(_ends(files.ca))
        self.context = context
        self._tell_of_end("own", files.cert, own)
        self._tell_of_end("ca", files.ca, trusted)

    def _tell_of_end(self, whose: str, path: Path, ends_at: float) -> None:
        self._metrics.certificate_expiry.labels(whose).set_function(lambda: ends_at - time.time())
        left = ends_at - time.time()
        if left <= 0:
            _log.error("the certificate in %s has expired: replace it; no restart is needed", path)
        elif left < WARN_BEFORE:
            _log.warning(
                "the certificate in %s expires in %.0f days: replace it; no restart is needed",
                path,
                left / DAY,
            )


def why_refused(error: OSError) -> str:
    """Why a handshake failed, for people."""
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not good here: {error.verify_message}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer showed no certificate"
    if reason in ("UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE"):
        return "the peer does not speak TLS 1.3"
    if reason == "HTTP_REQUEST":
        return "the peer speaks plain HTTP; its URL must begin with https://"
    if "ALERT" in reason:
        return f"the peer ended it, perhaps because it does not trust this server: {_words(reason)}"
    if reason:
        return _words(reason)
    if isinstance(error, ConnectionAbortedError):
        return "the peer took too long"
    if isinstance(error, ConnectionResetError):
        return "the peer closed the connection before the handshake was done"
    return str(error) or type(error).__name__


def _server_context(files: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # nobody comes back without showing its certificate
    context.set_alpn_protocols(["h2", "http/1.1"])
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: Tls) -> None:
    files.read()  # which says by name what cannot be read; the library does not
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"{files.cert} and {files.key} are no certificate and its key, in PEM: {_words(error.reason)}"
        ) from error
    except _Encrypted:
        raise ConfigurationError(
            f"{files.key} is encrypted; nobody is here to type its password: use a key without one"
        ) from None
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise ConfigurationError(f"{files.ca} has no certificates in PEM: {_words(error.reason)}") from error


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    raise _Encrypted


def _ends(path: Path) -> list[float]:
    """When each of the certificates in a file ends."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(_read(path, "cert"))
    except ValueError as error:
        raise ConfigurationError(f"{path} has a certificate that cannot be read: {error}") from error
    return [each.not_valid_after_utc.timestamp() for each in found]


def _read(path: Path, key: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError(f"{key}: {path} cannot be read: {error.strerror or error}") from error


def _words(reason: str | None) -> str:
    return (reason or "unknown").replace("_", " ").lower()
