"""Hands certificates and keys to Envoy, in files that exist only until Envoy has read them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from onceward.boundary.server.admin import CHECK_EVERY, PATIENCE, Admin
from onceward.boundary.server.envoy import IDENTITY, TRUST, identity_secret, secret_file, trust_secret
from onceward.errors import ConfigurationError

Pem = tuple[bytes, bytes, bytes]
"""CA, certificate, key."""


class Secrets:
    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime

    def write(self, pem: Pem) -> None:
        ca, certificate, key = pem
        for name, secret in ((IDENTITY, identity_secret(certificate, key)), (TRUST, trust_secret(ca))):
            path = secret_file(self._runtime, name)
            new = path.with_suffix(".new")
            new.touch(mode=0o600)
            new.write_bytes(msgspec.json.encode(secret))
            os.replace(new, path)  # Envoy notices this, and no other change

    def remove(self) -> None:
        for name in (IDENTITY, TRUST):
            secret_file(self._runtime, name).unlink(missing_ok=True)

    async def replace(self, pem: Pem, admin: Admin) -> None:
        """Raise `ConfigurationError` if Envoy refuses them; it keeps the previous ones."""
        before = await _counts(admin)
        self.write(pem)
        try:
            async with asyncio.timeout(PATIENCE):
                while (now := await _counts(admin))[0] < before[0] + 2 and now[1] == before[1]:
                    await asyncio.sleep(CHECK_EVERY)
        except TimeoutError:
            raise ConfigurationError("Envoy did not load the new certificates") from None
        finally:
            self.remove()
        if now[1] > before[1]:
            raise ConfigurationError("Envoy refuses the new certificates: see its line in the log")


async def _counts(admin: Admin) -> tuple[int, int]:
    """Return how many updates were loaded, and how many refused."""
    loaded = [await admin.count(f"sds.{name}.update_success") for name in (IDENTITY, TRUST)]
    refused = [await admin.count(f"sds.{name}.update_rejected") for name in (IDENTITY, TRUST)]
    return sum(loaded), sum(refused)
