"""Whose delivery it is, so it can be given back when its owner is known to be dead.

An owner is a process: `onceward run` gives each worker a name of its own. A lease is for the case that nothing is known
about the owner.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import Any

_RANDOM_BITS = 32


def new_token(owner: str) -> int:
    """Return a token for deliveries, of 63 bits: the first half is the same for all of one owner."""
    return tokens_of(owner)[0] | secrets.randbits(_RANDOM_BITS)


def tokens_of(owner: str) -> tuple[int, int]:
    """Return the first and the last token of an owner. Two owners with the same range are one in two billion; even then
    a delivery only ends early, and is fenced as if its lease had expired."""
    mark = int.from_bytes(blake2b(owner.encode(), digest_size=4).digest()) >> 1
    first = mark << _RANDOM_BITS
    return first, first | (1 << _RANDOM_BITS) - 1


def set_owner(connector: Any, owner: str | None) -> None:
    """Let the connector deliver in the name of this owner, if it can give back what a dead one held."""
    if owner is not None and can_release(connector):
        connector.owner = owner


def can_release(connector: Any) -> bool:
    return hasattr(connector, "release_owner") or hasattr(connector, "release_owner_async")
