"""What a database said, for people."""

from __future__ import annotations


def said_by(error: BaseException) -> str:
    """The driver's first line: without SQLAlchemy's page about it, the statement and its values."""
    told = getattr(error, "orig", None) or error
    lines = str(told).strip().splitlines()
    return lines[0] if lines else repr(told)
