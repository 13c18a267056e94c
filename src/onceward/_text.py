"""Text for people and databases: quantities, errors of drivers, what a terminal can show and a database store."""

from __future__ import annotations

import re

from onceward._secrets import mask

_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""What moves a cursor, sets a color, ends a line, reverses text or cannot be written at all. Joiners are harmless."""
_IN_LINES = re.compile(_CONTROLS.pattern.replace(r"\x00-\x1f", r"\x00-\x08\x0b-\x1f"))
BEYOND_JSON = re.compile(_CONTROLS.pattern.replace(r"\x00-\x1f", ""))
"""Those that JSON does not escape by itself."""


def quantity(number: int, thing: str, things: str | None = None) -> str:
    """`1 row`, `2,000 rows`. `things` is the plural, if it is not `thing` with an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def driver_message(error: BaseException) -> str:
    """The first line of the driver's message, without passwords and what SQLAlchemy adds: statement and values."""
    original = getattr(error, "orig", None) or error
    lines = str(original).strip().splitlines()
    return mask(lines[0] if lines else repr(original))


def printable(text: str) -> str:
    """The text as one line that controls no terminal: `\\n`, `\\x1b` and the like in place of control characters."""
    return _CONTROLS.sub(_escape, text)


def printable_lines(text: str) -> str:
    """`printable` for a text of several lines, such as a traceback or JSON."""
    return _IN_LINES.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]


def storable(text: str) -> str:
    """Escape lone surrogates and zero bytes, which some databases refuse."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def strip_category(error: str, message_id: str) -> str:
    """The exception and its text without the category and id that the engine and the inbox put before them."""
    before, is_there, rest = error.partition(f" [{message_id}]: ")
    return (rest if is_there and before.isupper() else error).removeprefix(f"event {message_id!r}: ")
