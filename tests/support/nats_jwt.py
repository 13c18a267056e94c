"""Operators, accounts and users of NATS, as `nsc` makes them: keys, JWTs and credentials files."""

from __future__ import annotations

import base64
import binascii
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIXES = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
SEED = 18 << 3
UNLIMITED = dict.fromkeys(("subs", "data", "payload"), -1)
ACCOUNT_LIMITS = {
    **UNLIMITED,
    **dict.fromkeys(("imports", "exports", "conn", "leaf"), -1),
    "wildcards": True,
}
JETSTREAM_LIMITS = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)


class Party(NamedTuple):
    """An operator, an account or a user, with its key."""

    kind: str
    key: Ed25519PrivateKey

    @classmethod
    def new(cls, kind: str) -> Party:
        return cls(kind, Ed25519PrivateKey.generate())

    @property
    def public(self) -> str:
        return _encode(bytes([PREFIXES[self.kind]]) + self.key.public_key().public_bytes_raw())

    @property
    def seed(self) -> str:
        prefix = PREFIXES[self.kind]
        return _encode(bytes([SEED | prefix >> 5, (prefix & 31) << 3]) + self.key.private_bytes_raw())

    def certify(self, other: Party, name: str, **nats: Any) -> str:
        """The JWT of another party, signed by this one."""
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        claims = {
            "jti": name,
            "iat": int(time.time()),
            "iss": self.public,
            "name": name,
            "sub": other.public,
            "nats": {**nats, "type": other.kind, "version": 2},
        }
        text = f"{_part(json.dumps(head).encode())}.{_part(json.dumps(claims).encode())}"
        return f"{text}.{_part(self.key.sign(text.encode()))}"


def operated(folder: Path) -> tuple[str, Path]:
    """Return the configuration of a server with an operator, and the credentials file of a user."""
    operator, system, account, user = map(Party.new, ("operator", "account", "account", "user"))
    accounts = {
        system.public: operator.certify(system, "SYS", limits=ACCOUNT_LIMITS),
        account.public: operator.certify(account, "shop", limits={**ACCOUNT_LIMITS, **JETSTREAM_LIMITS}),
    }
    preload = "\n".join(f'  {name}: "{jwt}"' for name, jwt in accounts.items())
    config = (
        f'operator: "{operator.certify(operator, "operator")}"\nsystem_account: {system.public}\nresolver: MEMORY\n'
        f"resolver_preload {{\n{preload}\n}}\n"
    )
    creds = folder / "user.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{account.certify(user, 'ann', **UNLIMITED)}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    return config, creds


def _encode(raw: bytes) -> str:
    checked = raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(checked).decode().rstrip("=")


def _part(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
