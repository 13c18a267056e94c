"""Credentials files of NATS: a JWT that says who the user is, and the seed of the key that proves it.

    -----BEGIN NATS USER JWT-----  …  -----BEGIN USER NKEY SEED-----  SU…

Read again for every connection, so a new file needs no restart.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from onceward.errors import ConfigurationError

_PART = re.compile(r"-----BEGIN [A-Z ]+-----\s*([A-Za-z0-9+/=._-]+)\s*-+END", re.ASCII)
_SEED = slice(2, 34)
"""Where the key is in a decoded seed, between its prefix and its checksum."""


def credentials_of(path: str) -> dict[str, Any]:
    """Return the arguments of `nats.connect` that use this file. Raises `ConfigurationError` if it is none."""
    _read(path)

    def jwt() -> bytes:
        return _read(path)[0].encode()

    return {"user_jwt_cb": jwt, "signature_cb": lambda nonce: _sign(path, nonce)}


def _read(path: str) -> tuple[str, bytes]:
    """Return the JWT and the key."""
    try:
        jwt, seed = _PART.findall(Path(path).read_text("utf-8"))
        key = base64.b32decode(seed + "=" * (-len(seed) % 8))[_SEED]
    except (OSError, ValueError):  # its text may quote the seed
        key, jwt = b"", ""
    if len(key) != 32:
        raise ConfigurationError(
            f"creds: {path} is not a credentials file of NATS, with a user's JWT and the seed of its key; make one "
            "with `nsc generate creds`"
        )
    return jwt, key


def _sign(path: str, nonce: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    signed = Ed25519PrivateKey.from_private_bytes(_read(path)[1]).sign(nonce.encode())
    return base64.b64encode(signed)
