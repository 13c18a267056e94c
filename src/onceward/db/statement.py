"""What a text of SQL would do to the session's transaction: it must be one statement, and must not end it."""

from __future__ import annotations

import re
from functools import lru_cache

_TOKEN = re.compile(
    r"""--[^\n]*                                             # a comment
      | /\*.*?(\*/|\Z)
      | \b[eE]'([^'\\]|''|\\.)*('|\Z)                        # a string with backslashes
      | '([^']|'')*('|\Z)
      | "([^"]|"")*("|\Z)
      | `([^`]|``)*(`|\Z)
      | (?<![\w$])\$(?P<tag>([^\W\d]\w*)?)\$.*?(\$(?P=tag)\$|\Z)
      | (?P<end>;)""",
    re.VERBOSE | re.DOTALL,
)
_ENDS_TRANSACTION = re.compile(
    r"""\s*(begin | start\s+transaction | commit | end | abort | prepare\s+transaction
        | rollback(?!(\s+(work|transaction))?\s+to\b))\b""",
    re.IGNORECASE | re.VERBOSE,
)
_HAS_A_BODY = re.compile(
    r"\s*create\s+(or\s+replace\s+)?((temp|temporary|constraint)\s+)?(trigger|function|procedure)\b",
    re.IGNORECASE,
)
"""Their bodies are statements that end with semicolons; no transaction can end there."""

ENDS_ITSELF = (
    "a session begins and ends its transaction itself: leave the block to commit, raise to roll back"
)


@lru_cache(500)
def refusal(sql: str) -> str | None:
    """Return why a session does not run this text; None if it does."""
    statements = [each for each in _split(sql) if each.strip()]
    has_a_body = bool(statements) and _HAS_A_BODY.match(statements[0]) is not None
    for each in statements:
        found = _ENDS_TRANSACTION.match(each)
        if found and not (has_a_body and found[1].lower() == "end"):
            return ENDS_ITSELF
    if len(statements) > 1 and not has_a_body:
        return f"a session runs one statement at a time, and this text has {len(statements)}; run each on its own"
    return None


def _split(sql: str) -> list[str]:
    """Split at semicolons outside of strings, names and comments, of which only blanks are left."""
    parts, start, text = [], 0, ""
    for token in _TOKEN.finditer(sql):
        text += sql[start : token.start()]
        start = token.end()
        if token["end"]:
            parts.append(text)
            text = ""
        else:
            text += " "
    return [*parts, text + sql[start:]]
