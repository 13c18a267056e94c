"""Decide which failures are logged with a traceback: each kind once, and again only after a while.

When a database is down, every message fails for the same reason. Each failure gets its log line; a thousand
identical tracebacks would hide everything else.
"""

from __future__ import annotations

import threading
from typing import Any

AGAIN_AFTER = 60.0
"""Seconds until the traceback of the same kind of failure is logged again."""
REMEMBERED = 256
"""Kinds of failures to remember. Beyond this the oldest is forgotten, and logged again."""
LINKS = 16
"""How many errors of a chain make up its kind. Chains may be circular."""


class Tracebacks:
    """The tracebacks that one call has logged. Thread-safe."""

    def __init__(self) -> None:
        self._shown: dict[Any, float] = {}
        self._lock = threading.Lock()

    def to_show(self, error: BaseException | None, now: float) -> BaseException | None:
        """Return the error if its traceback is to be logged, None if one of its kind just was."""
        if error is None:
            return None
        kind = kind_of(error)
        with self._lock:
            if now - self._shown.get(kind, now - AGAIN_AFTER) < AGAIN_AFTER:
                return None
            self._shown.pop(kind, None)  # reinsert as the newest
            if len(self._shown) >= REMEMBERED:
                del self._shown[next(iter(self._shown))]
            self._shown[kind] = now
        return error


def kind_of(error: BaseException) -> tuple[Any, ...]:
    """The type of an error and the line that raised it, for it and every error that led to it.

    Without the rest of the traceback, which grows each time the same object is raised again.
    """
    kind: list[Any] = []
    links = [error]
    while links and len(kind) < LINKS:
        link = links.pop()
        kind.append((type(link), _origin(link)))
        if isinstance(link, BaseExceptionGroup):
            links.extend(link.exceptions)
        earlier = link.__cause__ if link.__suppress_context__ else link.__context__
        if earlier is not None:
            links.append(earlier)
    return tuple(kind)


def _origin(error: BaseException) -> tuple[str, int] | None:
    traceback = error.__traceback__
    if traceback is None:
        return None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
