"""A CA and certificates for zones, for development only. A real deployment has its own CA."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from onceward._files.private import make_directory
from onceward.boundary.tls import Tls
from onceward.errors import ConfigurationError

HOSTS = ("localhost", "127.0.0.1")
CA = "onceward development CA"
CLOCK_SKEW = timedelta(minutes=5)
"""Clocks may differ by this much: a certificate becomes valid this long before it is issued."""
MOST_DAYS = 36_500


class Authority:
    """Signs certificates. Its key and certificate are `ca.key` and `ca.pem` in its directory."""

    def __init__(self, directory: Path, *, days: float) -> None:
        """Use the existing key and certificate, or create them."""
        self._directory = directory
        self._days = days
        self._files = _files(directory, "ca")
        if _exist(self._files):
            self._key = _read_key(Path(self._files.key))
            self._certificate = _read_certificate(Path(self._files.cert))
            self._check_can_sign()
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name(CA)
        self._certificate = (
            _builder(name, name, self._key, _days_from_now(days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        _write_key(Path(self._files.key), self._key)
        _write(Path(self._files.cert), _pem(self._certificate), 0o644)

    def issue(self, identity: str, file: str, hosts: Sequence[str], *, days: float | None = None) -> Tls:
        """Create a key and a certificate for a client and, if there are hosts, for a server at these.

        It does not outlive its CA.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        ends = min(
            _days_from_now(self._days if days is None else days), self._certificate.not_valid_after_utc
        )
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
        builder = (
            _builder(_name(identity), self._certificate.subject, key, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([*purposes, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False
            )
        files = _files(self._directory, file)
        _write_key(Path(files.key), key)
        _write(Path(files.cert), _pem(builder.sign(self._key, hashes.SHA256())), 0o644)
        return files

    def check_issued(self, files: Tls, identity: str) -> None:
        """Raise `ConfigurationError` unless this CA issued the certificate, and for this identity."""
        certificate = _read_certificate(Path(files.cert))
        try:
            certificate.verify_directly_issued_by(self._certificate)
        except (ValueError, TypeError, InvalidSignature):
            raise ConfigurationError(
                f"{files.cert} was not issued by the CA in {self._files.cert}; use another directory"
            ) from None
        if certificate.subject != _name(identity):
            known = certificate.subject.rfc4514_string().removeprefix("CN=")
            raise ConfigurationError(
                f"{files.cert} belongs to {known!r}, and nothing is overwritten; choose another name for {identity!r}"
            )

    def _check_can_sign(self) -> None:
        if self._certificate.public_key() != self._key.public_key():
            raise ConfigurationError(f"{self._files.key} is not the key of {self._files.cert}")
        if self._certificate.not_valid_after_utc < datetime.now(UTC):
            raise ConfigurationError(
                f"{self._files.cert} has expired; create a new CA and all certificates in another directory"
            )


@dataclass(frozen=True)
class CertificateFiles:
    identity: str
    tls: Tls
    is_new: bool
    """False if the files existed already; they were left unchanged."""


def make_certificates(
    directory: Path, zones: Sequence[str], hosts: Sequence[str], days: int, peers: Sequence[str] = ()
) -> list[CertificateFiles]:
    """Create one for each zone, with identity `<zone>-bsfg`, and one for each peer, with its name as identity.

    Overwrites nothing: an existing CA and certificates are left unchanged, and missing ones are added.
    """
    hosts = list(dict.fromkeys([*HOSTS, *hosts]))
    wanted = {zone: (f"{zone}-bsfg", hosts) for zone in zones} | {peer: (peer, []) for peer in peers}
    _check(zones, peers, hosts, days)
    try:
        make_directory(directory)
        existing = {file for file in wanted if _exist(_files(directory, file))}
        if existing and not _exist(_files(directory, "ca")):
            raise ConfigurationError(
                f"{directory} has certificates, but not the ca.pem and ca.key that issued them; use another directory"
            )
        authority = Authority(directory, days=days)
        for file in existing:
            authority.check_issued(_files(directory, file), wanted[file][0])
        return [
            CertificateFiles(identity, _files(directory, file), is_new=False)
            if file in existing
            else CertificateFiles(identity, authority.issue(identity, file, served), is_new=True)
            for file, (identity, served) in wanted.items()
        ]
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or directory} cannot be written: {error.strerror or error}"
        ) from error


def _check(zones: Sequence[str], peers: Sequence[str], hosts: Sequence[str], days: int) -> None:
    if not zones and not peers:
        raise ConfigurationError("name at least one zone or peer: --zone plant-a, --peer billing")
    for kind, names in (("zone", zones), ("peer", peers)):
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,50}", name) or name == "ca":
                raise ConfigurationError(
                    f"{kind} {name!r} cannot be a file name: use letters, digits, dots and dashes, and not 'ca'"
                )
    if both := set(zones) & set(peers):
        raise ConfigurationError(
            f"{min(both)!r} cannot be both a zone and a peer: their files would have the same name"
        )
    for host in hosts:
        _host(host)
    if not 1 <= days <= MOST_DAYS:
        raise ConfigurationError(f"--days must be 1 or more, and at most {MOST_DAYS}, not {days}")


def _files(directory: Path, file: str) -> Tls:
    return Tls(ca=directory / "ca.pem", cert=directory / f"{file}.pem", key=directory / f"{file}.key")


def _exist(files: Tls) -> bool:
    """Raise `ConfigurationError` if only one of the certificate and the key exists."""
    found = [each for each in (files.cert, files.key) if Path(each).exists()]
    if len(found) == 1:
        [missing] = {files.cert, files.key} - set(found)
        raise ConfigurationError(
            f"{found[0]} exists without {Path(missing).name}, and nothing is overwritten; remove it or use another "
            "directory"
        )
    return bool(found)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), ends) - CLOCK_SKEW)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _days_from_now(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


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
        raise ConfigurationError(f"--host must be a host name or an IP address, not {host!r}")
    return x509.DNSName(host)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{path} cannot be read as a key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{path} was not created by this command; use another directory")
    return key


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"{path} cannot be read as a certificate: {error}") from error


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write(path, encoded, 0o600)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Never overwrite a file, and set its permissions from the start."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
