"""What a connector offers to URLs: how to check, open, explain and count the places that they name.

A connector package has one `SCHEME = Scheme(…)`. Those of other packages are found by their entry points: see
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
    from onceward.connectors.reports import SourceCounts, SourceFacts
    from onceward.connectors.urls import Address


class Setting(msgspec.Struct, frozen=True):
    """A setting of a URL, after its question mark."""

    convert: Callable[[str], Any] = str
    """From the text of the URL to the value of the setting; raises ValueError if it is not one."""
    expects: str = "a text"
    """For the message about a value that cannot be converted: `lease must be a number of seconds`."""
    divides: bool = False
    """Whether two consumers with different values each get every message, as two groups of a Redis stream do."""


def _lease_setting(kind: Any) -> Setting:
    expects = {float: "a number of seconds", int: "a whole number"}
    return Setting(kind, expects[kind]) if kind in expects else Setting()


LEASE_SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {field.name: _lease_setting(field.type) for field in msgspec.structs.fields(LeaseRules)}
)
"""The fields of `LeaseRules`. A scheme that has them in its `settings` gets values that `LeaseRules` accepts."""


class OpenConnector(Protocol):
    def __call__(self, address: Address, /, *, asynchronous: bool) -> Any:
        """A connector that the caller closes: an `AsyncConnector` if `asynchronous`, otherwise a `Connector`."""
        ...


def _accept(address: Address) -> None:
    """Every URL of the scheme is right."""


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of source and sink, as URLs name it. Import drivers inside of these functions, not beside them."""

    names: tuple[str, ...]
    """What stands before ://, as in `("redis", "rediss")`."""
    open: OpenConnector
    """Opens a connector. The settings in `address.settings` have been converted and checked."""
    settings: Mapping[str, Setting] = {}
    """Settings that a URL may have, by name. Start from `LEASE_SETTINGS` if the connector leases."""
    check: Callable[[Address], None] = _accept
    """Calls `address.refuse(…)` if the URL names nothing. It opens nothing and asks no server."""
    facts: Callable[[Address], SourceFacts] | None = None
    """For `onceward explain`: how durable the source is as it is set up now. Changes nothing. A server that does not
    answer goes into `unreachable`, or is a `ServerUnreachable`. None: the connector does not say."""
    counts: Callable[[Address], SourceCounts] | None = None
    """For `onceward balance`: what the source has counted. Changes nothing, and raises `ServerUnreachable` if the
    source does not answer. None: the connector does not count."""
    in_process: bool = False
    """Whether only the process itself sees the messages. `onceward run` refuses such a source."""


@contextmanager
def required_package(package: str, extra: str) -> Iterator[None]:
    """Around the import of a driver: says what to install if it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ConfigurationError(f"this source needs {package}: pip install 'onceward[{extra}]'") from error
