"""What a send refuses. Nothing is written then."""

from __future__ import annotations

from onceward.errors import OncewardError


class OutboxError(OncewardError, ValueError):
    """A message cannot be sent like this. Nothing was written; the message says what to do."""
