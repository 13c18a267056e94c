"""Engines with one connection for everybody, as StaticPool gives to in-memory databases.

Two sessions on it would be one transaction, and the first to end would end both. The second is refused before it
touches the connection: even giving it back would roll the first one back.
"""

from __future__ import annotations

from threading import Lock
from weakref import WeakSet

from sqlalchemy import Engine
from sqlalchemy.pool import Pool, StaticPool

from onceward.db.exceptions import SessionError

_lock = Lock()
_in_use: WeakSet[Pool] = WeakSet()


def reserve(engine: Engine) -> Pool | None:
    """The pool to `free` at the end, if this is such an engine."""
    pool = engine.pool
    if not isinstance(pool, StaticPool):
        return None
    with _lock:
        if pool in _in_use:
            raise SessionError(
                "this engine has one connection for all (StaticPool), and another session is using it; "
                "end that one first, or use a database file"
            )
        _in_use.add(pool)
    return pool


def free(pool: Pool | None) -> None:
    if pool is not None:
        with _lock:
            _in_use.discard(pool)
