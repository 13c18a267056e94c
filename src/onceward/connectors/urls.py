"""Where messages come from and go to, by URL.

    sqlite:///orders.db?lease=30&max_deliveries=5           a queue in a file; sqlite:////var/lib/orders.db
    redis://localhost:6379/0/orders?group=billing           a stream of a Redis database (0 may be left out); rediss://
    boundary+http://localhost:7700?consumer=billing         a boundary, under a durable name; boundary+https:// with
                                                            ca=…&cert=…&key=…; a sink has from_zone=…&to_zone=…
    memory://orders                                         within this process, for tests

What stands behind the question mark are the settings of the connector, by the names its class has. A URL is checked
as a whole when it is read; nothing is opened then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from onceward.connectors.lease_rules import LeaseRules
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBERS: Mapping[str, tuple[type, str]] = {
    "lease": (float, "a number of seconds"),
    "redelivery_delay": (float, "a number of seconds"),
    "max_deliveries": (int, "a whole number"),
    "maxlen": (int, "a whole number"),
}
CREDENTIALS = re.compile(r"(?i)(pass|pwd|secret|token|credential)")
"""Names of settings whose values are never shown, though no source has one of them."""


class Address:
    """A URL that names a source, taken apart. Its text is without a password."""

    def __init__(self, url: str, *, sink: bool = False) -> None:
        self.url = url
        self.sink = sink
        self.scheme = url.partition("://")[0] if isinstance(url, str) and "://" in url else ""
        if self.scheme not in _KINDS:
            raise ConfigurationError(
                f"{shown_url(str(url))!r} is no {self.role}: its URL begins with "
                f"{', '.join(f'{name}://' for name in _KINDS)}"
            )
        try:
            parts = urlsplit(url)
            self.port = parts.port
        except ValueError:  # whose text may quote a password
            self._refuse(
                "it is no URL: the port is no number, or the host is none; / ? # @ of a password are written %2F %3F "
                "%23 %40"
            )
        if parts.fragment:
            self._refuse("it has a #; write %23 where that is part of a name or a password")
        self.netloc = parts.netloc
        self.hostname = parts.hostname or ""
        self.path = unquote(parts.path)
        self.place = f"{parts.netloc}{self.path}"
        self.settings = self._settings(parts.query)
        self._check_rules()
        _KINDS[self.scheme].check(self)

    @property
    def queue(self) -> tuple[str, ...]:
        """What is the same for two who take each other's messages."""
        names = (self.settings.get(name, "") for name in ("group", "consumer"))
        return (self.scheme, self.place, *map(str, names))

    @property
    def role(self) -> str:
        return "sink" if self.sink else "source"

    @property
    def kind(self) -> str:
        """sqlite, redis, boundary or memory."""
        return _KINDS[self.scheme].name

    @property
    def origin(self) -> str:
        """Where it is, without settings: dead letters go by it."""
        return str(self).partition("?")[0]

    def open(self, *, asynchronous: bool) -> Any:
        """A connector, which is the caller's to close."""
        return _KINDS[self.scheme].open(self, asynchronous)

    def __str__(self) -> str:
        return shown_url(self.url)

    def _refuse(self, problem: str) -> Any:
        raise ConfigurationError(f"the {self.role} {shown_url(self.url)!r}: {problem}")

    def _settings(self, query: str) -> dict[str, Any]:
        takes = _KINDS[self.scheme].takes
        settings: dict[str, Any] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in takes:
                self._refuse(f"{self.scheme} has no setting {name!r}; it has {', '.join(sorted(takes))}")
            if name in settings:
                self._refuse(f"it has {name} twice; leave out one of them")
            settings[name] = self._number(name, value) if name in NUMBERS else value
            if not value:
                self._refuse(f"{name} is empty; give it a value, or leave it out")
        return settings

    def _number(self, name: str, value: str) -> Any:
        kind, wanted = NUMBERS[name]
        try:
            return kind(value)
        except ValueError:
            return self._refuse(f"{name} must be {wanted}, not {value!r}")

    def _check_rules(self) -> None:
        try:
            LeaseRules(**{name: self.settings[name] for name in _RULES if name in self.settings})
        except ConfigurationError as error:
            self._refuse(str(error))
        if self.settings.get("maxlen", 1) < 1:
            self._refuse("maxlen must be 1 or more")


def shown_url(url: str) -> str:
    """Without passwords, also where the URL is none."""
    head, question, query = url.partition("?")
    scheme, colon, rest = head.partition("://")
    user, at, host = rest.rpartition("@")
    if at and scheme not in ("sqlite", "memory"):
        name, has_password, _ = user.partition(":")
        rest = f"{name}:***@{host}" if has_password else f"{user}@{host}"
    shown = "&".join(_shown_setting(each) for each in query.split("&"))
    return f"{scheme}{colon}{rest}{question}{shown}"


def _shown_setting(setting: str) -> str:
    name, equals, value = setting.partition("=")
    return f"{name}{equals}{'***' if CREDENTIALS.search(name) else value}"


# ── SQLite ──────────────────────────────────────────────────────────────────────────────────────────────

SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")


def file_of(address: Address) -> str:
    """The path of a queue in a file."""
    return address.path.removeprefix("/")


def _check_sqlite(address: Address) -> None:
    if address.netloc or file_of(address) in ("", ":memory:") or file_of(address).endswith("/"):
        address._refuse("it names no file; write sqlite:///orders.db, or sqlite:////var/lib/orders.db")
    if "synchronous" in address.settings:
        mode = address.settings["synchronous"] = address.settings["synchronous"].upper()
        if mode not in SYNCHRONOUS:
            address._refuse(f"synchronous must be one of {', '.join(SYNCHRONOUS)}, not {mode!r}")


def _open_sqlite(address: Address, asynchronous: bool) -> Any:
    from onceward.connectors.sqlite import AsyncSqliteConnector, SqliteConnector

    kind: Any = AsyncSqliteConnector if asynchronous else SqliteConnector
    return kind(file_of(address), **address.settings)


# ── Redis ───────────────────────────────────────────────────────────────────────────────────────────────


def stream_of(address: Address) -> tuple[str, str]:
    """The URL of the server, with its database, and the name of the stream."""
    database, _, stream = address.path.strip("/").rpartition("/")
    return f"{address.scheme}://{address.netloc}/{database or 0}", stream


def _check_redis(address: Address) -> None:
    database, _, stream = address.path.strip("/").rpartition("/")
    if not stream or (not database and stream.isdecimal()) or (database and not database.isdecimal()):
        address._refuse(
            "it names no stream; write redis://localhost:6379/orders?group=billing, or with the number of a database "
            "redis://localhost:6379/0/orders?group=billing"
        )
    if not address.hostname:
        address._refuse("it names no host; write redis://localhost:6379/orders")


def _open_redis(address: Address, asynchronous: bool) -> Any:
    with _needing("redis", "redis"):
        from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector

    server, stream = stream_of(address)
    kind: Any = AsyncRedisStreamsConnector if asynchronous else RedisStreamsConnector
    return kind(server, stream, **address.settings)


# ── a boundary ──────────────────────────────────────────────────────────────────────────────────────────


def boundary_of(address: Address) -> str:
    """Its own URL."""
    return f"{address.scheme.removeprefix('boundary+')}://{address.place.rstrip('/')}"


def _check_boundary(address: Address) -> None:
    given = address.settings.keys()
    if not address.hostname:
        address._refuse("it names no host; write boundary+http://localhost:7700?consumer=billing")
    if not address.sink and "consumer" not in given:
        address._refuse("a source needs a durable name for its cursor: add ?consumer=NAME")
    if address.sink and not given >= {"from_zone", "to_zone"}:
        address._refuse("a sink says from where to where facts go: add ?from_zone=HERE&to_zone=THERE")
    if 0 < len(given & _FILES) < len(_FILES):
        address._refuse("a certificate needs all of ca, cert and key")
    if given & _FILES and address.scheme == "boundary+http":
        address._refuse("there are no certificates without TLS; write boundary+https://")


def _open_boundary(address: Address, asynchronous: bool) -> Any:
    with _needing("connectrpc", "boundary"), _needing("pyqwest", "boundary"):
        from onceward.connectors.boundary.factory import open_boundary

    settings = dict(address.settings)
    consumer = settings.pop("consumer", None)
    tls = {name: settings.pop(name) for name in _FILES & settings.keys()}
    return open_boundary(boundary_of(address), consumer, tls, settings, asynchronous=asynchronous)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────


def _check_memory(address: Address) -> None:
    if not address.place:
        address._refuse("it has no name; write memory://orders")


def _open_memory(address: Address, asynchronous: bool) -> Any:
    from onceward.connectors.memory import open_memory

    return open_memory(address.place, address.settings, asynchronous=asynchronous)


@contextmanager
def _needing(package: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ConfigurationError(f"this source needs {package}: pip install 'onceward[{extra}]'") from error


class _Kind(NamedTuple):
    name: str
    check: Callable[[Address], None]
    open: Callable[[Address, bool], Any]
    takes: frozenset[str]


_RULES = frozenset(("lease", "max_deliveries", "redelivery_delay", "on_failure"))
_FILES = frozenset(("ca", "cert", "key"))
_FACTS = frozenset(("consumer", "from_zone", "to_zone")) | _FILES | _RULES
_REDIS = _Kind("redis", _check_redis, _open_redis, _RULES | {"group", "maxlen"})
_BOUNDARY = _Kind("boundary", _check_boundary, _open_boundary, _FACTS)
_KINDS = {
    "sqlite": _Kind("sqlite", _check_sqlite, _open_sqlite, _RULES | {"synchronous"}),
    "redis": _REDIS,
    "rediss": _REDIS,
    "boundary+http": _BOUNDARY,
    "boundary+https": _BOUNDARY,
    "memory": _Kind("memory", _check_memory, _open_memory, _RULES),
}
