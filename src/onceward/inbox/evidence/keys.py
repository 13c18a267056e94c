"""Ed25519 keys: one signs evidence in CI, others are trusted where a consumer runs.

A key is PEM text or the path of a PEM file, as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write
them; a public key also fits on one line, as `ed25519:BASE64`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ONE_LINE = "ed25519:"
_PEM = re.compile(r"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)
_PUBLIC = f"write the public key: PEM, the path of a PEM file, or one line of {ONE_LINE}BASE64"
_PRIVATE = "create one with `openssl genpkey -algorithm ed25519 -out evidence.key`"


def signing_key(given: str, origin: str) -> Ed25519PrivateKey:
    """Return the private key in PEM text or in a file. Raises ConfigurationError without quoting it."""
    text = given if "-----BEGIN" in given else _read(given.strip(), origin)
    kind = _ed25519().Ed25519PrivateKey

    def load(data: bytes) -> Any:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        return load_pem_private_key(data, password=None)

    found = _load(
        load, _unescaped(text), f"{origin} is not a private key in PEM without a password; {_PRIVATE}"
    )
    if not isinstance(found, kind):
        raise ConfigurationError(f"{origin} is not an Ed25519 key; {_PRIVATE}")
    key: Ed25519PrivateKey = found
    return key


def trusted_keys(given: str, origin: str) -> dict[str, Ed25519PublicKey]:
    """Return the public keys by their ids. Several, for rotation: PEM after PEM, or separated by commas or spaces."""
    keys = {}
    parts = [given] if "-----BEGIN" in given else re.split(r"[\s,]+", given.strip())
    for part in filter(None, parts):
        text = part if "-----BEGIN" in part or part.startswith(ONE_LINE) else _read(part, origin)
        for each in _split(_unescaped(text)):
            key = _public_key(each, origin)
            keys[key_id(key)] = key
    if not keys:
        raise ConfigurationError(f"{origin} has no key; {_PUBLIC}")
    return keys


def public_line(key: Ed25519PrivateKey) -> str:
    """The public half of a key, on one line."""
    return ONE_LINE + base64.b64encode(key.public_key().public_bytes_raw()).decode()


def key_id(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _split(text: str) -> list[str]:
    return [found[0] for found in _PEM.finditer(text)] or text.split()


def _public_key(text: str, origin: str) -> Ed25519PublicKey:
    if "PRIVATE KEY" in text:
        raise ConfigurationError(
            f"{origin} is a private key, which must not leave CI; write the public one, as "
            "`openssl pkey -in evidence.key -pubout` prints it"
        )
    kind = _ed25519().Ed25519PublicKey

    def load(data: bytes) -> Any:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        if data.startswith(ONE_LINE.encode()):
            raw = base64.b64decode(data.removeprefix(ONE_LINE.encode()), validate=True)
            return kind.from_public_bytes(raw)
        return load_pem_public_key(data)

    found = _load(load, text, f"{origin} is not an Ed25519 public key; {_PUBLIC}")
    if not isinstance(found, kind):
        raise ConfigurationError(f"{origin} is not an Ed25519 public key; {_PUBLIC}")
    key: Ed25519PublicKey = found
    return key


def _load(load: Callable[[bytes], Any], text: str, problem: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(text.encode())
    except (ValueError, TypeError, binascii.Error, UnsupportedAlgorithm):
        raise ConfigurationError(problem) from None


def _unescaped(text: str) -> str:
    """A variable often has its line breaks as \\\\n."""
    return text.replace("\\n", "\n").strip()


def _read(path: str, origin: str) -> str:
    try:
        return Path(path).read_text("ascii")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not a text file"
        raise ConfigurationError(f"{origin}: the key file {path[:200]} cannot be read: {why}") from None


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise ConfigurationError(
            "signed evidence needs cryptography: pip install 'onceward[evidence]'"
        ) from None
    return ed25519
