"""Where messages come from and go to, by URL.

    sqlite:///orders.db?lease=30&max_deliveries=5           a queue in a file
    redis://localhost:6379/0/orders?group=billing           a stream of a Redis database (0 may be left out)
    boundary+http://localhost:7700?consumer=billing         a boundary, under a durable name
    memory://orders                                         within this process, for tests

What stands behind the question mark are the settings of the connector, by the names its class has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from onceward.task.exceptions import ConfigurationError

NUMBERS = {"lease": float, "redelivery_delay": float, "max_deliveries": int, "maxlen": int, "timeout": float}

_memories: dict[tuple[str, bool], Any] = {}


class Address:
    """A URL that names a source, taken apart."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            parts = urlsplit(url)
            self.port = parts.port
        except ValueError as error:
            raise ConfigurationError(f"{url!r} is no URL: {error}") from None
        self.scheme = parts.scheme
        if self.scheme not in _KINDS:
            raise ConfigurationError(
                f"{url!r} is no source: its URL begins with {', '.join(f'{name}://' for name in _KINDS)}"
            )
        self.place = f"{parts.netloc}{unquote(parts.path)}"
        self.netloc = parts.netloc
        self.path = unquote(parts.path)
        self.settings = _settings(url, parts.query)

    def open(self, *, asynchronous: bool) -> Any:
        """A connector, which is the caller's to close."""
        make, takes = _KINDS[self.scheme]
        unknown = self.settings.keys() - takes
        if unknown:
            raise ConfigurationError(
                f"{self.url!r}: {self.scheme} has no setting {', '.join(sorted(unknown))}; it has "
                f"{', '.join(sorted(takes))}"
            )
        return make(self, asynchronous)

    def __str__(self) -> str:
        """Without a password."""
        user, at, _ = self.netloc.rpartition("@")
        shown = f"{user.partition(':')[0]}:***" if ":" in user else user
        return self.url.replace(f"{user}{at}", f"{shown}{at}", 1)


def _settings(url: str, query: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        kind = NUMBERS.get(name, str)
        try:
            settings[name] = kind(value)
        except ValueError:
            raise ConfigurationError(f"{url!r}: {name} must be a number, not {value!r}") from None
    return settings


def _sqlite(address: Address, asynchronous: bool) -> Any:
    from onceward.connectors.sqlite import AsyncSqliteConnector, SqliteConnector

    path = address.path.removeprefix("/")
    if address.netloc or not path:
        raise ConfigurationError(
            f"{address.url!r} names no file; write sqlite:///orders.db, or sqlite:////var/lib/orders.db"
        )
    return (AsyncSqliteConnector if asynchronous else SqliteConnector)(path, **address.settings)


def _redis(address: Address, asynchronous: bool) -> Any:
    with _needs("redis", "redis"):
        from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector

    database, _, stream = address.path.strip("/").rpartition("/")
    if not stream or (database and not database.isdecimal()):
        raise ConfigurationError(
            f"{address.url!r} names no stream; write redis://localhost:6379/orders?group=billing"
        )
    url = f"{address.scheme}://{address.netloc}/{database or 0}"
    kind = AsyncRedisStreamsConnector if asynchronous else RedisStreamsConnector
    return kind(url, stream, **address.settings)


def _boundary(address: Address, asynchronous: bool) -> Any:
    with _needs("connectrpc", "boundary"):
        from onceward.boundary import AsyncBoundaryClient, BoundaryClient
        from onceward.connectors.boundary import AsyncBoundaryConnector, BoundaryConnector

    settings = dict(address.settings)
    url = f"{address.scheme.removeprefix('boundary+')}://{address.place}"
    consumer = settings.pop("consumer", None)
    if asynchronous:
        return AsyncBoundaryConnector(AsyncBoundaryClient(url), consumer, **settings)
    return BoundaryConnector(BoundaryClient(url), consumer, **settings)


def _memory(address: Address, asynchronous: bool) -> Any:
    """One for each name, so that a producer's sink is a consumer's source."""
    from onceward.connectors.memory import AsyncMemoryConnector, MemoryConnector

    key = (address.place, asynchronous)
    if key not in _memories:
        _memories[key] = (AsyncMemoryConnector if asynchronous else MemoryConnector)(**address.settings)
    return _memories[key]


class _needs:
    def __init__(self, package: str, extra: str) -> None:
        self._package, self._extra = package, extra

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == self._package:
            raise ConfigurationError(
                f"this source needs {self._package}: pip install 'onceward[{self._extra}]'"
            ) from error


_RULES = {"lease", "max_deliveries", "redelivery_delay", "on_failure"}
_FACTS = {"consumer", "from_zone", "to_zone", "max_deliveries", "redelivery_delay", "on_failure"}
_KINDS: dict[str, tuple[Callable[[Address, bool], Any], set[str]]] = {
    "sqlite": (_sqlite, _RULES | {"synchronous"}),
    "redis": (_redis, _RULES | {"group", "maxlen"}),
    "rediss": (_redis, _RULES | {"group", "maxlen"}),
    "boundary+http": (_boundary, _FACTS),
    "boundary+https": (_boundary, _FACTS),
    "memory": (_memory, _RULES),
}
