"""The error of a provider that does not answer, as its client would raise it.

A handler catches what its client raises: an error of httpx or requests, or one of the client's own. So the error is one
of all of these at once, and whatever a handler catches for a lost answer, it catches this.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

_LIBRARIES = (
    ("httpx", "ReadTimeout"),
    ("requests.exceptions", "ReadTimeout"),
    ("aiohttp", "ServerTimeoutError"),
    ("urllib3.exceptions", "ReadTimeoutError"),
    ("urllib.error", "URLError"),
    ("botocore.exceptions", "ReadTimeoutError"),
    ("smtplib", "SMTPServerDisconnected"),
)
"""What these raise. Those that nobody has imported, nobody catches."""
_MEANS_SILENCE = re.compile(
    r"time_?d?_?out|unavailable|connect(ion)?_?error|network|unreachable", re.IGNORECASE
)
"""Names of a client's own errors, such as APIConnectionError."""


class Unanswered(TimeoutError, ConnectionError):
    """Raised instead of a call of the provider. It says nothing about the other side."""

    def __init__(self, text: str) -> None:  # those of clients take anything
        self.args = (text,)

    def __str__(self) -> str:
        return str(self.args[0])


def silence_of(function: Any, text: str) -> Unanswered:
    """The error for a call of this method of a client."""
    found = [*_of_libraries(), *_of_client(function)]
    specific = [each for each in found if not any(each is not one and issubclass(one, each) for one in found)]
    kind: Any = Unanswered
    for each in dict.fromkeys(specific):
        try:
            kind = type(Unanswered.__name__, (kind, each), {})
        except TypeError:  # the two cannot be one
            continue
    made: Unanswered = kind(text)
    return made


def _of_libraries() -> Iterator[type[Exception]]:
    for module, name in _LIBRARIES:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type):
            yield found


def _of_client(function: Any) -> Iterator[type[Exception]]:
    """The client's own errors: in its class, and in the modules of that class and its bases."""
    for each in type(getattr(function, "__self__", None)).__mro__[:-1]:
        for known in (vars(each), vars(sys.modules.get(each.__module__, object))):
            for name, value in [*known.items()]:
                if isinstance(value, type) and issubclass(value, Exception) and _MEANS_SILENCE.search(name):
                    yield value
