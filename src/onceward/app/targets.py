"""Where the messages of an app's outbox go: its consumers and producers by name; and the database that they wait in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from onceward.app.send.event_types import with_event_type
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.outbox.outbox import Place

if TYPE_CHECKING:
    from onceward.app.app import Onceward


class AppTargets:
    """The functions of one app, as `onceward.outbox` names them."""

    def __init__(self, app: Onceward) -> None:
        self._app = app

    def check(self, address: Address) -> None:
        """Raise `ConfigurationError` if the relay cannot publish there."""
        self._app.detour(address)

    def name_of(self, function: Callable[..., Any]) -> str:
        """Return `consumer:NAME` or `producer:NAME`."""
        app = self._app
        consumers = [each.name for each in app.consumers.values() if each.function == function]
        producers = [each.name for each in app.producers.values() if each.function == function]
        if len(consumers) == 1:
            return f"consumer:{consumers[0]}"
        if producers and not consumers:
            return f"producer:{producers[0]}"
        name = getattr(function, "__name__", repr(function))
        if consumers:
            raise ConfigurationError(
                f"{name} is {len(consumers)} consumers of {app.name}: {', '.join(consumers)}; send to the URL of one"
            )
        known = ", ".join([*app.consumers, *app.producers]) or "none"
        raise ConfigurationError(
            f"{name} is neither a consumer nor a producer of {app.name}, which has {known}; decorate it, or give "
            "a URL"
        )

    def address_of(self, name: str) -> Address:
        """Return where a named function gets its messages now."""
        kind, _, own = name.partition(":")
        if kind == "consumer" and own in self._app.consumers:
            return self._app.consumers[own].source
        if kind == "producer" and own in self._app.producers:
            return self._app.producers[own].sink
        raise ConfigurationError(
            f"{self._app.name} has no {kind} {own!r}; its messages wait in the outbox until an app "
            "that has it relays them"
        )

    def with_event_type(self, name: str, payload: Any, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metadata with the event type that the contract of a consumer accepts, if it has none."""
        kind, _, own = name.partition(":")
        consumer = self._app.consumers[own] if kind == "consumer" else self._app.producers[own].follows
        if consumer is None:
            return metadata
        return with_event_type(consumer.name, consumer.contract, payload, metadata)


def reachable(address: Address) -> Address:
    """Return it. Raises `ConfigurationError` if only one process could read there what it has written."""
    if address.in_process:
        address.refuse(
            "the relay of the outbox runs in another process and has another memory, where messages are lost; use a "
            "durable one, such as sqlite:///orders.db, or test the app with onceward.testing.app"
        )
    return address


def database_place(app: Onceward) -> Place:
    """The database of the app, as far as its URL says it."""
    from onceward.app.build import database_url

    url = database_url(app.database, asynchronous=False)
    options = url.normalized_query.get("options", ())
    paths = re.findall(r"-c\s*search_path=((?:\\.|\S)+)", " ".join(options))
    return Place(url.get_backend_name(), url.database, paths[-1].replace("\\", "") if paths else None)
