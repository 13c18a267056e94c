"""How a connector handles its URLs: checking, opening, explaining and counting what they name.

A connector package has one `SCHEME = Scheme(…)`. Entry points make those of other packages known: see
`onceward.connectors.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from onceward.connectors.lease_rules import LeaseRules
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from onceward.connectors.reports import SourceBacklog, SourceCounts, SourceFacts
    from onceward.connectors.urls import Address


class Setting(msgspec.Struct, frozen=True):
    """A setting of a URL, after its question mark."""

    convert: Callable[[str], Any] = str
    """Converts the text in the URL to the value of the setting; raises ValueError if it cannot."""
    expects: str = "a string"
    """For the error message about an invalid value: `lease must be a number of seconds`."""
    divides: bool = False
    """Whether two consumers with different values each get every message, as two groups of a Redis stream do."""


def _lease_setting(kind: Any) -> Setting:
    expects = {float: "a number of seconds", int: "a whole number"}
    return Setting(kind, expects[kind]) if kind in expects else Setting()


LEASE_SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {field.name: _lease_setting(field.type) for field in msgspec.structs.fields(LeaseRules)}
)
"""The fields of `LeaseRules`. A scheme with these in its `settings` gets values that `LeaseRules` accepts."""


class OpenConnector(Protocol):
    def __call__(self, address: Address, /, *, asynchronous: bool) -> Any:
        """Return a connector that the caller closes: an `AsyncConnector` if `asynchronous`, otherwise a `Connector`."""
        ...


def _accept(address: Address) -> None:
    """Accept every URL of the scheme."""


def _named_by_path(address: Address) -> None:
    return None


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of source and sink, as URLs name it. Import drivers inside these functions, not at the top."""

    names: tuple[str, ...]
    """What comes before ://, as in `("redis", "rediss")`."""
    open: OpenConnector
    """Opens a connector. The settings in `address.settings` have been converted and checked."""
    settings: Mapping[str, Setting] = {}
    """Settings that a URL may have, by name. Start from `LEASE_SETTINGS` if the connector leases."""
    check: Callable[[Address], None] = _accept
    """Calls `address.refuse(…)` if the URL is incomplete. Opens nothing, and queries no server."""
    identity: Callable[[Address], str | None] = _named_by_path
    """What the URL names, if its path does not say it: equal for two URLs that name the same, without secrets. Dead
    letters are stored under it. None if it is the URL up to its question mark."""
    facts: Callable[[Address], SourceFacts] | None = None
    """For `onceward explain`: how durable the source is as configured now. Changes nothing. A server that does not
    answer goes into `unreachable`, or raises `ServerUnreachable`. None if the connector cannot report this."""
    counts: Callable[[Address], SourceCounts] | None = None
    """For `onceward balance`: what the source has counted. Changes nothing, and raises `ServerUnreachable` if the
    source does not answer. None if the connector does not count."""
    arrivals: Callable[[Address], SourceCounts] | None = None
    """`counts` of a sink, for every consumer of it: for `onceward balance` of an outbox. None if `counts` says it."""
    backlog: Callable[[Address], SourceBacklog] | None = None
    """For `/metrics` and the console: what waits now. Called every few seconds, so it reads no messages. Changes
    nothing, and raises `ServerUnreachable`. None if the connector cannot tell."""
    joins: Callable[[Address, Connection], bool] | None = None
    """For `onceward explain`: whether the source is in the database of this connection, and acknowledging a message is
    part of its handler's transaction. Changes nothing. None if that cannot be."""
    connections: int = 0
    """How many connections to a PostgreSQL one connector opens at most."""
    keeps_order: bool = False
    """Whether its connectors have `keep_order`, which has them deliver only the first message of each key: see
    `onceward.connectors.lines`."""
    in_process: bool = False
    """Whether messages are visible only inside one process. `onceward run` refuses such a source."""
    waits: bool = False
    """Whether `open` may wait, as for the lock of a file. For asyncio it is then called in a thread."""


@contextmanager
def required_package(package: str, extra: str) -> Iterator[None]:
    """Wrap the import of a driver: raises `ConfigurationError` with what to install if it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ConfigurationError(f"this source needs {package}: pip install 'onceward[{extra}]'") from error
