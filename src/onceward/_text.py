"""Numbers of things, in words."""

from __future__ import annotations


def quantity(number: int, thing: str, things: str | None = None) -> str:
    """`1 row`, `2,000 rows`; `things` where that is not the word with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


# What a database said, for people.


def driver_message(error: BaseException) -> str:
    """The driver's first line: without SQLAlchemy's page about it, the statement and its values."""
    told = getattr(error, "orig", None) or error
    lines = str(told).strip().splitlines()
    return lines[0] if lines else repr(told)
