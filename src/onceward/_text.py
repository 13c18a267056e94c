"""Text for people: quantities, and errors of database drivers."""

from __future__ import annotations


def quantity(number: int, thing: str, things: str | None = None) -> str:
    """`1 row`, `2,000 rows`. `things` is the plural, if it is not `thing` with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def driver_message(error: BaseException) -> str:
    """The first line of the driver's message, without what SQLAlchemy adds: the statement and its values."""
    original = getattr(error, "orig", None) or error
    lines = str(original).strip().splitlines()
    return lines[0] if lines else repr(original)
