"""Passwords and tokens in URLs and connection strings. Everything that is shown or logged goes through here.

`mask_url` takes a text that is a URL; `mask` a text that may quote some, such as the message of a driver. Drivers also
quote parts of a URL, so opening one calls `remember`, and `mask` hides its passwords wherever they turn up.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

MASK = "***"

SECRET_NAME = re.compile(
    r"""(?ix) (?<!by)(?<!com) pass(?!ed|es\b|ing|age|ive|port|eng|ion) | pwd | secret | token(?!s|iz) | credential
        | (?<![a-z])creds?(?![a-z]) | jwt | signature | authorization | ^auth$ | ^sig$
        | (?:api|access|account|private|shared|signing|encryption|ssl)[_.-]?key(?!log)"""
)
"""Finds names of settings and variables whose values are never shown."""
KEY_NAME = re.compile(r"(?i)(?:hex|text)?key")
"""Finds names of settings that have the key of an encrypted database or of a service, unless they name a file."""
KEY_FILES = ("nats", "tls", "boundary")
"""Schemes whose `key` is the file of a client's TLS key."""
FILE_NAME = re.compile(r"(?i)creds|ssl_?key|\w*(?<!pro)file")
"""Finds names of settings whose values are paths. They are not shown either, but their words are those of any text."""
PATHS = ("sqlite", "memory", "file")
"""Schemes of paths and names, where an @ is part of the name."""
WEB = ("http", "https", "boundary", "ws", "wss")
"""Schemes whose paths may contain an @, as in /users/ann@example.com. The URLs of settings have no such path."""
TOKENS = (*WEB, "nats", "tls")
"""Schemes where a single word before the @ is a token."""
HARMLESS = ("", "none", "null", "true", "false", MASK)
MOST_REMEMBERED = 512
SHORTEST, LONG_ENOUGH = 6, 12
"""Characters of a password that `remember` keeps. A shorter one may be any word, unless it has digits or signs."""

_URL = re.compile(r"""(?i)(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+://(?:\\.|[^\s'"`\\])+""")
_NO_COLON = re.compile(r"(?i)[a-z][a-z0-9+.-]*//[^/]*")
"""The scheme and the user of a URL without the colon between them."""
_NEXT_SERVER = re.compile(r"(?i),(?=[a-z][a-z0-9+.-]*://)")
_SEPARATOR = re.compile(r"([?&;#])")
_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_SETTING = re.compile(
    rf"""(?<![\w.%-])([\w.%-]++)(\s*=\s*)({_QUOTED}|[^\s&;,'")\]}}]+)"""
    rf"""|(['"])([\w.-]+)\4(\s*:\s*)({_QUOTED})"""
)
_PIECES = re.compile(r"[@/?#:&,\s'\"]+")

_known: dict[str, None] = {}
_known_pattern: re.Pattern[str] | None = None


def names_secret(name: str) -> bool:
    """Whether the value of a setting or variable with this name must not be shown."""
    return SECRET_NAME.search(unquote(name)) is not None


def mask_url(url: str) -> str:
    """Replace passwords and tokens by ***, even if it is not a valid URL. The rest stays readable."""
    return _mask_url(url, [])


def mask(text: str) -> str:
    """Replace the passwords in URLs and connection strings that a text quotes, and all that are remembered."""
    if _known_pattern is not None:
        text = _known_pattern.sub(MASK, text)
    return mask_shown(text)


def mask_shown(text: str) -> str:
    """Replace the passwords in URLs and connection strings that a text quotes, and nothing else: the same in every
    process, for names that another one looks up."""
    if "://" in text:
        text = _URL.sub(lambda found: _mask_servers(found[0], [], is_whole=False), text)
    return _mask_settings(text, []) if SECRET_NAME.search(text) else text


def remember(url: str) -> None:
    """Have `mask` hide the passwords of this URL from now on, also where a driver quotes only a part of it."""
    global _known_pattern
    found: list[str] = []
    shown = _mask_url(url, found)
    before = len(_known)
    for secret in found:
        plain = unquote(secret)
        for each in (secret, plain, quote(plain, safe=""), repr(plain)[1:-1], *_PIECES.split(plain)):
            if _is_distinct(each) and each not in shown and len(_known) < MOST_REMEMBERED:
                _known[each] = None
    if len(_known) > before:
        _known_pattern = re.compile("|".join(map(re.escape, sorted(_known, key=len, reverse=True))))


def _is_distinct(secret: str) -> bool:
    """Whether hiding it everywhere hides nothing else: `password` and `123456` appear in other texts, too."""
    if len(secret) < SHORTEST or secret.isdecimal():
        return False
    return len(secret) >= LONG_ENOUGH or not secret.isalpha()


def _mask_url(url: str, found: list[str]) -> str:
    if "://" in url:
        return _mask_servers(url, found, is_whole=True)
    name, colon, rest = url.partition(":")
    if colon and "@" in rest and ("/" not in name or _NO_COLON.fullmatch(name)):  # not quite a URL
        password, _, host = rest.rpartition("@")
        found.append(password)
        url = f"{name}:{MASK}@{host}"
    return _mask_settings(url, found)


def _mask_servers(urls: str, found: list[str], *, is_whole: bool) -> str:
    """Mask URLs that are separated by commas, as those of a cluster."""
    each_of = _NEXT_SERVER.split(urls)
    if not all("@" in each or _has_host(each) for each in each_of):
        each_of = [urls]  # the comma is part of a password
    return ",".join(_mask_one(each, found, is_whole) for each in each_of)


def _has_host(url: str) -> bool:
    return re.match(r"[^:]+://[^/:@]*(?::\d+)?(?:[/?#]|$)", url) is not None


def _mask_one(url: str, found: list[str], is_whole: bool) -> str:
    scheme, colon, rest = url.partition("://")
    family = scheme.lower().partition("+")[0]
    end = _end_of_user(family, rest, is_whole)
    user, place = rest[: max(end, 0)], rest[max(end, 0) :]
    name, has_password, password = user.partition(":")
    if has_password:
        found.append(password)
        user = f"{name}:{MASK}"
    elif user and family in TOKENS:
        found.append(user)
        user = MASK
    if is_whole and end < 0 and family not in PATHS:
        place = _mask_port(place, found)
    return f"{scheme}{colon}{user}{_mask_query(family, place, found)}"


def _end_of_user(family: str, rest: str, is_whole: bool) -> int:
    """Where the @ after user and password is; -1 if there is none. Passwords may contain what they should escape."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if family in PATHS:
        return -1 if family == "memory" else authority.rfind("@")
    host, port, number = authority.rpartition(":")
    is_plain = "@" not in authority and (not port or number.isdecimal() or host.startswith("["))
    head, _, query = rest.partition("?")
    before, at, after = query.rpartition("@")
    is_host = is_whole and re.search(r"[/?:]", after) is not None  # values of settings escape these
    if at and ("=" not in before or is_host or ("@" not in head and not is_plain)):
        if is_plain and not port:
            return -1
        return rest.rindex("@")
    may_be_password = is_whole and (port or "@" in authority)  # what is before a slash may look like a port
    if family in WEB and (is_plain or "@" in authority) and not may_be_password:
        return authority.rfind("@")
    return head.rfind("@")


def _mask_port(place: str, found: list[str]) -> str:
    """Mask a port that is not a number: the host after a password is missing."""
    authority, rest = re.fullmatch(r"(?s)([^/?#]*)(.*)", place).groups()  # type: ignore[union-attr]
    host, colon, port = authority.rpartition(":")
    if not colon or not port or port.isdecimal() or "[" in authority:
        return place
    found.append(port)
    return f"{host}:{MASK}{rest}"


def _mask_query(family: str, place: str, found: list[str]) -> str:
    """Mask the settings after the question mark. A piece without a name belongs to the value before it."""
    parts = _SEPARATOR.split(place)
    setting, is_secret = "", False
    for number in range(2, len(parts), 2):
        name, equals, value = parts[number].partition("=")
        setting = name if equals else setting
        is_key = family not in KEY_FILES and KEY_NAME.fullmatch(unquote(name)) is not None
        is_secret = names_secret(name) or is_key if equals else is_secret and bool(name)
        if is_secret and (value or not equals):
            if not FILE_NAME.fullmatch(unquote(setting)):
                found.append(value if equals else name)
            parts[number] = f"{name}={MASK}" if equals else MASK
    return "".join(parts)


def _mask_settings(text: str, found: list[str]) -> str:
    """Mask `password=…` in a connection string, and `"password": "…"` in JSON."""

    def hide(match: re.Match[str]) -> str:
        name, equals, value, quotes, key, colon, quoted = match.groups()
        given = (value or quoted).strip("'\"")
        if not names_secret(name or key) or given.lower() in HARMLESS:
            return match[0]
        if not FILE_NAME.fullmatch(name or key):
            found.append(given)
        return f"{name}{equals}{MASK}" if name else f'{quotes}{key}{quotes}{colon}"{MASK}"'

    return _SETTING.sub(hide, text)
