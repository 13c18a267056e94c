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
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from onceward.boundary.tls import Tls
from onceward.errors import ConfigurationError

HOSTS = ("localhost", "127.0.0.1")
CA = "onceward development CA"
CLOCKS_DIFFER = timedelta(minutes=5)
"""By so much at most, we hope; a certificate begins that much before it is made."""


class Authority:
    """Signs certificates. Its key and certificate are `ca.key` and `ca.pem` of its directory."""

    def __init__(self, directory: Path, *, days: float) -> None:
        """Takes those that are there, or makes them."""
        self._directory = directory
        self._days = days
        self._place = _place(directory, "ca")
        if _are_there(self._place):
            self._key = _read_key(Path(self._place.key))
            self._certificate = _read_certificate(Path(self._place.cert))
            self._check_it_can_sign()
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name(CA)
        self._certificate = (
            _begun(name, name, self._key, _ends(days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        _write_key(Path(self._place.key), self._key)
        _write(Path(self._place.cert), _pem(self._certificate), 0o644)

    def issue(self, identity: str, file: str, hosts: Sequence[str], *, days: float | None = None) -> Tls:
        """A key, and a certificate with which its owner can be a client, and at these hosts, if any, a server. It does
        not outlive its CA."""
        key = ec.generate_private_key(ec.SECP256R1())
        ends = min(_ends(self._days if days is None else days), self._certificate.not_valid_after_utc)
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
        builder = (
            _begun(_name(identity), self._certificate.subject, key, ends)
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
        made = _place(self._directory, file)
        _write_key(Path(made.key), key)
        _write(Path(made.cert), _pem(builder.sign(self._key, hashes.SHA256())), 0o644)
        return made

    def check_is_of(self, place: Tls, identity: str) -> None:
        """Raises `ConfigurationError` unless this certificate is of this CA and for this identity."""
        certificate = _read_certificate(Path(place.cert))
        try:
            certificate.verify_directly_issued_by(self._certificate)
        except (ValueError, TypeError, InvalidSignature):
            raise ConfigurationError(
                f"{place.cert} is not of the CA in {self._place.cert}; take another directory"
            ) from None
        if certificate.subject != _name(identity):
            known = certificate.subject.rfc4514_string().removeprefix("CN=")
            raise ConfigurationError(
                f"{place.cert} is that of {known!r}, and nothing is overwritten; choose another name than for "
                f"{identity!r}"
            )

    def _check_it_can_sign(self) -> None:
        if self._certificate.public_key() != self._key.public_key():
            raise ConfigurationError(f"{self._place.key} is not the key of {self._place.cert}")
        if self._certificate.not_valid_after_utc < datetime.now(UTC):
            raise ConfigurationError(
                f"{self._place.cert} has expired; make a new CA and all certificates in another directory"
            )


@dataclass(frozen=True)
class Made:
    identity: str
    tls: Tls
    is_new: bool
    """Otherwise it was there, and is as it was."""


def make_certificates(
    directory: Path, zones: Sequence[str], hosts: Sequence[str], days: int, peers: Sequence[str] = ()
) -> list[Made]:
    """One for each zone, whose identity is the zone's name and `-bsfg`, and for each peer, whose identity is its name.

    A CA and certificates that are in the directory stay as they are, and the others are added. Overwrites nothing.
    """
    hosts = list(dict.fromkeys([*HOSTS, *hosts]))
    wanted = {zone: (f"{zone}-bsfg", hosts) for zone in zones} | {peer: (peer, []) for peer in peers}
    _check(zones, peers, hosts, days)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        there = {file for file in wanted if _are_there(_place(directory, file))}
        if there and not _are_there(_place(directory, "ca")):
            raise ConfigurationError(
                f"{directory} has certificates, but no ca.pem and ca.key of theirs; take another directory"
            )
        authority = Authority(directory, days=days)
        for file in there:
            authority.check_is_of(_place(directory, file), wanted[file][0])
        return [
            Made(identity, _place(directory, file), is_new=False)
            if file in there
            else Made(identity, authority.issue(identity, file, places), is_new=True)
            for file, (identity, places) in wanted.items()
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
                    f"{kind} {name!r} cannot be the name of files: use letters, digits, dots, dashes, and not 'ca'"
                )
    if both := set(zones) & set(peers):
        raise ConfigurationError(f"{min(both)!r} cannot be a zone and a peer: both are names of files")
    for host in hosts:
        _host(host)
    if days < 1:
        raise ConfigurationError(f"--days must be 1 or more, not {days}")


def _place(directory: Path, file: str) -> Tls:
    return Tls(ca=directory / "ca.pem", cert=directory / f"{file}.pem", key=directory / f"{file}.key")


def _are_there(place: Tls) -> bool:
    """Raises `ConfigurationError` if only one of the two is."""
    found = [each for each in (place.cert, place.key) if Path(each).exists()]
    if len(found) == 1:
        [lacking] = {place.cert, place.key} - set(found)
        raise ConfigurationError(
            f"{found[0]} is there already without {Path(lacking).name}, and nothing is overwritten; remove it or take "
            "another directory"
        )
    return bool(found)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), ends) - CLOCKS_DIFFER)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _ends(days: float) -> datetime:
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
        raise ConfigurationError(f"--host must be a name or an IP address, not {host!r}")
    return x509.DNSName(host)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{path} cannot be read as a key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{path} was not made by this command; take another directory")
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
    """Never over something else, and with its rights from the beginning."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
