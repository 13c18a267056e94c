"""TLS 1.3 with certificates on both sides: their files, whether they can be used, and the reasons a handshake fails."""

from __future__ import annotations

import logging
import os
import re
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from onceward.boundary.metrics import BoundaryMetrics

_log = OwnLogger(logging.getLogger("onceward.boundary"))

Path = str | os.PathLike[str]
DAY = 86400.0
WARN_BEFORE = 30 * DAY
"""Warn this many seconds before a certificate expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Three PEM files, for a server or a client."""

    ca: Path
    """Trusted to sign the other side's certificate."""
    cert: Path
    """Shown to the other side; with any intermediate certificates."""
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the CA, the certificate and the key. Raise `ConfigurationError` if one cannot be read."""
        return _read(self.ca, "ca"), _read(self.cert, "cert"), _read(self.key, "key")


def client_context(files: Tls) -> ssl.SSLContext:
    """Build a context for Python's own HTTP client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, files)
    return context


class ServerTls:
    """Watches over a server's own certificates: whether they can be used, and when they expire."""

    def __init__(self, metrics: BoundaryMetrics) -> None:
        self._metrics = metrics

    @staticmethod
    def checked(files: Tls) -> tuple[bytes, bytes, bytes]:
        """Return CA, certificate and key. Raise `ConfigurationError` if a file cannot be used."""
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
        _expiry_times(files.cert), _expiry_times(files.ca)
        return files.read()

    def report(self, files: Tls) -> None:
        """Warn of certificates that expire soon, and count the seconds until they do."""
        self._report_expiry("own", files.cert, _expiry_times(files.cert)[0])
        self._report_expiry("ca", files.ca, max(_expiry_times(files.ca)))

    def _report_expiry(self, whose: str, path: Path, ends_at: float) -> None:
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


def why_refused(reason: str, end: str) -> str:
    """Explain why a handshake failed, from Envoy's reason and from how the connection ended."""
    if found := re.search(r"CERTIFICATE_VERIFY_FAILED.*:_([^:]+):TLS_error_end", reason):
        return f"the peer's certificate is not accepted: {_words(found[1])}"
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return "the peer showed no certificate"
    if "UNSUPPORTED_PROTOCOL" in reason:
        return "the peer does not speak TLS 1.3"
    if "HTTP_REQUEST" in reason:
        return "the peer speaks plain HTTP; its URL must begin with https://"
    found = re.search(r"OPENSSL_internal:([A-Z0-9_]+)", reason)
    words = _words(found[1] if found else reason)
    if "ALERT" in reason or "BAD_RECORD_MAC" in reason:  # an alert in plain text
        return f"the peer ended it; perhaps it does not trust this server: {words}"
    if words:
        return words
    if "timeout" in end:
        return "the peer took too long"
    return "the peer closed the connection before the handshake was done"


def _load(context: ssl.SSLContext, files: Tls) -> None:
    files.read()  # names the file that cannot be read; the library does not
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except ssl.SSLError as error:
        why = _words(error.reason) or "one of them has neither"
        raise ConfigurationError(
            f"{files.cert} and {files.key} are not a certificate and its key in PEM: {why}"
        ) from error
    except _Encrypted:
        raise ConfigurationError(
            f"{files.key} is encrypted; use a key without a password: there is no prompt for it"
        ) from None
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise ConfigurationError(f"{files.ca} has no certificates in PEM: {_words(error.reason)}") from error


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    raise _Encrypted


def _expiry_times(path: Path) -> list[float]:
    """Return when each certificate in a file expires."""
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
    return (reason or "").replace("_", " ").lower()
