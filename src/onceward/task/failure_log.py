"""Which failures are logged with their traceback: each kind of failure once, and again only after a while.

When a database is down, every message fails for the same reason. Each gets its line in the log; a thousand equal
tracebacks between them would hide whatever else goes wrong.
"""

from __future__ import annotations

import threading
from typing import Any

AGAIN_AFTER = 60.0
"""Seconds until the traceback of the same failure is shown again."""
REMEMBERED = 256
"""Kinds of failures. A task that fails in more ways than this forgets the oldest, and shows it again."""
LINKS = 16
"""How much of a chain of errors tells its kind. Chains may be circular."""


class Tracebacks:
    """What one call has shown. Asked only when something failed, from any thread."""

    def __init__(self) -> None:
        self._shown: dict[Any, float] = {}
        self._lock = threading.Lock()

    def to_show(self, error: BaseException | None, now: float) -> BaseException | None:
        """The error, if it is to be logged with its traceback; None if one of its kind just was."""
        if error is None:
            return None
        kind = kind_of(error)
        with self._lock:
            if now - self._shown.get(kind, now - AGAIN_AFTER) < AGAIN_AFTER:
                return None
            self._shown.pop(kind, None)  # what is shown now is the youngest again
            if len(self._shown) >= REMEMBERED:
                del self._shown[next(iter(self._shown))]
            self._shown[kind] = now
        return error


def kind_of(error: BaseException) -> tuple[Any, ...]:
    """The type of an error and the line that raised it, and the same of every error that led to it.

    Not the way the error took from there: an object that is raised again and again has a longer one each time.
    """
    kind: list[Any] = []
    links = [error]
    while links and len(kind) < LINKS:
        link = links.pop()
        kind.append((type(link), _raised_at(link)))
        if isinstance(link, BaseExceptionGroup):
            links.extend(link.exceptions)
        earlier = link.__cause__ if link.__suppress_context__ else link.__context__
        if earlier is not None:
            links.append(earlier)
    return tuple(kind)


def _raised_at(error: BaseException) -> tuple[str, int] | None:
    way = error.__traceback__
    if way is None:
        return None
    while way.tb_next is not None:
        way = way.tb_next
    return way.tb_frame.f_code.co_filename, way.tb_lineno
