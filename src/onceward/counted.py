"""Numbers of things, in words."""

from __future__ import annotations


def counted(number: int, thing: str, things: str | None = None) -> str:
    """`1 row`, `2,000 rows`; `things` where that is not the word with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"
