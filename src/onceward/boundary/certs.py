"""A CA and certificates for zones, to develop and try things with. A real deployment has a CA of its own."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from onceward.boundary.tls import Tls
from onceward.task.exceptions import ConfigurationError

HOSTS = ("localhost", "127.0.0.1")
CA = "onceward development CA"
CLOCKS_DIFFER = timedelta(minutes=5)
"""By so much at most, we hope; a certificate begins that much before it is made."""


class Authority:
    """Signs certificates. Its key and certificate are `ca.key` and `ca.pem` of its directory."""

    def __init__(self, directory: Path, *, days: float) -> None:
        """Makes them."""
        self._directory = directory
        self._days = days
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name(CA)
        self._certificate = (
            _begun(name, name, self._key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        _write_key(directory / "ca.key", self._key)
        _write(directory / "ca.pem", _pem(self._certificate), 0o644)

    def issue(self, identity: str, file: str, hosts: Sequence[str], *, days: float | None = None) -> Tls:
        """A key, and a certificate with which its owner can be a server, at these hosts, and a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _begun(_name(identity), self._certificate.subject, key, self._days if days is None else days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        made = Tls(
            ca=self._directory / "ca.pem",
            cert=self._directory / f"{file}.pem",
            key=self._directory / f"{file}.key",
        )
        _write_key(Path(made.key), key)
        _write(Path(made.cert), _pem(certificate), 0o644)
        return made


@dataclass(frozen=True)
class Made:
    identity: str
    tls: Tls


def make_certificates(directory: Path, zones: Sequence[str], hosts: Sequence[str], days: int) -> list[Made]:
    """One for each zone, whose identity is the zone's name and `-bsfg`. Overwrites nothing."""
    zones, hosts = list(dict.fromkeys(zones)), list(dict.fromkeys([*HOSTS, *hosts]))
    if not zones:
        raise ConfigurationError("name at least one zone: --zone plant-a")
    for zone in zones:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,50}", zone) or zone == "ca":
            raise ConfigurationError(
                f"zone {zone!r} cannot be the name of files: use letters, digits, dots, dashes, and not 'ca'"
            )
    for host in hosts:
        _host(host)
    if days < 1:
        raise ConfigurationError(f"--days must be 1 or more, not {days}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in ("ca", *zones):
            for path in (directory / f"{file}.pem", directory / f"{file}.key"):
                if path.exists():
                    raise ConfigurationError(
                        f"{path} is there already, and nothing is overwritten; remove it or take another directory"
                    )
        authority = Authority(directory, days=days)
        return [Made(f"{zone}-bsfg", authority.issue(f"{zone}-bsfg", zone, hosts)) for zone in zones]
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or directory} cannot be written: {error.strerror or error}"
        ) from error


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - CLOCKS_DIFFER)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise ConfigurationError(f"--host must be a name or an IP address, not {host!r}")
    return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write(path, encoded, 0o600)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Never over something else, and with its rights from the beginning."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
