"""Ids of events to test with."""

from __future__ import annotations

import hashlib
from uuid import UUID

NOON_MS = 43_200_000


def uuid7_of(day: int, name: object) -> str:
    """Return a UUID of version 7 with a time of that day; the same for the same name."""
    noise = int.from_bytes(hashlib.sha256(str(name).encode()).digest()[:9], "big")
    ms = day * 86_400_000 + NOON_MS
    return str(UUID(int=ms << 80 | 0x7 << 76 | (noise >> 60 & 0xFFF) << 64 | 0b10 << 62 | noise & 2**60 - 1))
