"""Ids of events: how a new one is made, which spellings are the same one, and the day that some of them contain."""

from __future__ import annotations

import os
import re
import time
from itertools import chain
from struct import Struct

_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}"
_ANY_UUID = re.compile(rf"(?:urn:uuid:)?(?:({_HEX})|\{{({_HEX})\}}|\(({_HEX})\))", re.IGNORECASE | re.ASCII)
_CANONICAL = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
SHORTEST_UUID = 32
"""Characters of a UUID without dashes: a shorter id is none."""
_MS_PER_DAY = 86_400_000
FIRST_DAY, LAST_DAY = 19723, 29219
"""2024-01-01 and 2049-12-31, in days since 1970. The time in a UUID of version 7 outside of these is not believed: no
producer meant it, so it is a clock that is wrong, or another kind of id that only looks like one, such as an MD5 in
hex. The limits are fixed, because the same id must give the same answer on every day."""


def new_id() -> str:
    """Return a new UUID of version 7: it contains its own time, so its records can be stored and removed by day."""
    global _latest
    ms = time.time_ns() // 1_000_000
    latest = _latest
    if latest[0] != ms:  # ids that are made in a row have the same beginning
        latest = _latest = ms, _beginning(ms)
    try:  # as `_random_part`
        return latest[1] + _random.pop()
    except IndexError:
        return latest[1] + _random_part()


def id_at(seconds: float) -> str:
    """Return a new UUID of version 7 with this time, in seconds since 1970."""
    return _beginning(int(seconds * 1000) & 2**48 - 1) + _random_part()


_AT_ONCE = 256
"""Random parts that are read together: asking the system takes longer than all the rest of an id."""
_random: list[str] = []
os.register_at_fork(after_in_child=_random.clear)  # or parent and child would make the same ids
_VARIANTS = bytes(b"89ab"[byte % 4] for byte in range(256))
_PIECES = Struct("3s3s12s" * _AT_ONCE)
_PARTS = b"-7%b-%c%b-%b " * _AT_ONCE
"""How all of them look: formatted in one go, they take a third of the time."""


def _beginning(ms: int) -> str:
    at = f"{ms:012x}"
    return f"{at[:8]}-{at[8:]}"


_latest = (0, _beginning(0))
"""The last moment that an id was made, and how it begins."""


def _random_part() -> str:
    try:
        return _random.pop()
    except IndexError:
        first, *rest = _draw()
        _random.extend(rest)
        return first


def _draw() -> list[str]:
    """Return the random parts of ids."""
    pieces = _PIECES.unpack(os.urandom(9 * _AT_ONCE).hex().encode())
    variants = os.urandom(_AT_ONCE).translate(_VARIANTS)
    in_order = zip(pieces[::3], variants, pieces[1::3], pieces[2::3], strict=True)
    return (_PARTS % tuple(chain.from_iterable(in_order))).decode().split()


def same_id(text: str) -> str:
    """Return the one spelling of a UUID, whatever its case, dashes, braces, URN prefix or surrounding blanks. Any other
    id is returned as it is."""
    if len(text) < SHORTEST_UUID or _CANONICAL.fullmatch(text):
        return text
    found = _ANY_UUID.fullmatch(text.strip())
    return text if found is None else _dashed(found[found.lastindex or 0].replace("-", "").lower())


def uuid7_ms(text: str) -> int | None:
    """Return the milliseconds since 1970 in a UUID of version 7, as `same_id` spells it. None for anything else."""
    # Checking two characters first is faster than the pattern for most other ids.
    if text[14:15] == "7" and text[19:20] in ("8", "9", "a", "b") and _CANONICAL.fullmatch(text):
        return int(text[:8] + text[9:13], 16)
    return None


def day_in(text: str) -> int | None:
    """Return the day in a UUID of version 7, in days since 1970. None if there is none, or one not to be believed.

    It depends on nothing but the id, so it can say where the id's record is.
    """
    ms = uuid7_ms(text) if text[14:15] == "7" else None
    if ms is None:
        return None
    day = ms // _MS_PER_DAY
    return day if FIRST_DAY <= day <= LAST_DAY else None


def _dashed(digits: str) -> str:
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
