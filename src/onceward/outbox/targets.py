"""Where a message goes, as the outbox stores it: the name of a consumer or a producer, or a URL.

A name is resolved when the message is relayed, so a setting that moves a consumer's source moves its messages, too, and
no password of it is stored. A URL is stored as it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from onceward._secrets import mask_url
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.outbox.errors import OutboxError

Target = str | Callable[..., Any]
"""A consumer function of the app, a producer function of it, or a URL."""


class Targets(Protocol):
    """The functions of an app that messages can go to."""

    def name_of(self, function: Callable[..., Any]) -> str:
        """Return `consumer:NAME` or `producer:NAME`. Raises `ConfigurationError` if it is neither."""
        ...

    def check(self, address: Address) -> None:
        """Raise `ConfigurationError` if the relay cannot publish there."""
        ...

    def address_of(self, name: str) -> Address:
        """Return where messages for this name go now. Raises `ConfigurationError` if the app has no such function."""
        ...

    def with_event_type(self, name: str, payload: Any, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metadata with the event type that the function's consumer expects, if it has none. Raises
        `ConfigurationError` if that is not known."""
        ...


def stored(target: Any, targets: Targets) -> str:
    """Return the text that names a target in the table. Raises `OutboxError` if there is no such target."""
    try:
        if isinstance(target, str):
            sink = Address(target, sink=True)
            targets.check(sink)
            return sink.url
        if callable(target):
            name = targets.name_of(target)
            targets.check(targets.address_of(name))
            return name
    except ConfigurationError as error:
        raise OutboxError(f"nothing was sent: {error}") from None
    raise OutboxError(
        "nothing was sent: a target is a consumer or producer function of the app, or a URL, not "
        f"{type(target).__name__}"
    )


def address(target: str, targets: Targets) -> Address:
    """Return where messages for a stored target go now. Raises `ConfigurationError` if that is not known."""
    return Address(target, sink=True) if "://" in target else targets.address_of(target)


def shown(target: str) -> str:
    """A stored target for people, without passwords."""
    return mask_url(target) if "://" in target else target
