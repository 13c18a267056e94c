"""The relay of an app's outbox as one of its consumers: run, stopped, counted and restarted like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onceward._process.readiness import Doorbell
from onceward.app.app import RELAY, Consumer, Onceward
from onceward.app.services import Injection, Services
from onceward.connectors.urls import Address
from onceward.failures.rules import RuleBook
from onceward.outbox.targets import address
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.telemetry.conventions import Destination
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.outbox.relay import Relay

POLICY = {
    "loop": {
        "mode": "continuous",
        "batch": {"size": 16},
        "concurrency": {"value": 16},
    }
}
"""Sixteen targets at once."""


def relay(transaction: Transaction) -> None:
    """Send messages of the outbox to their targets."""


class RelaySignature:
    """How a delivery gets to the relay: its connector sends what it has claimed."""

    model = None
    injection = Injection(Services(), {})
    guests: Mapping[str, Any] = {}

    def method(self, function: Callable[..., Any], *, asynchronous: bool) -> Callable[..., Any]:
        def process(task: Any, transaction: Transaction, /, **_: Any) -> None:
            task.connectors["source"].publish(transaction)

        return process


class OutboxAddress(Address):
    """The outbox of an app as a source."""

    def __init__(self, app: Onceward, *, in_place: bool) -> None:
        self._app = app
        self._in_place = in_place
        self.url = "outbox"
        self.sink = False
        self.scheme = "outbox"
        self.settings = {}

    @property
    def queue(self) -> tuple[str, ...]:
        return (self.scheme,)

    @property
    def destination(self) -> Destination:
        return Destination("onceward_outbox", self._app.name)

    @property
    def in_process(self) -> bool:
        return False

    @property
    def origin(self) -> str:
        return self.scheme

    def __str__(self) -> str:
        return self.scheme

    def open(self, *, asynchronous: bool) -> Relay:
        from onceward.outbox.relay import Relay
        from onceward.schedules.timetable import Timetable

        app = self._app
        engine = app.engines.take(asynchronous=False)
        targets = app.outbox.targets
        door = Doorbell()
        timetable = Timetable(
            engine,
            app.name,
            app.schedules.values(),
            app.outbox,
            in_place=self._in_place,
            on_made=door.ring,
        )
        return Relay(
            engine,
            lambda target: app.detour(address(target, targets)),
            retention=app.settings.outbox_retention,
            timetable=timetable,
            door=door,
            on_close=app.engines.give_back,
        )


class RelayConsumer(Consumer):
    """A consumer that nobody decorated. It runs in threads, whatever the others do: every sink has a connector for
    threads."""

    def __init__(self, app: Onceward, *, in_place: bool = False) -> None:
        """With `in_place`, a look at schedules ends when their producers have returned."""
        self.says_contract = True
        self.function = relay
        self.name = RELAY
        self.signature: Any = RelaySignature()
        self.source = OutboxAddress(app, in_place=in_place)
        self.policy = ConsumerPolicy.model_validate(POLICY)
        self.asynchronous = self.takes_batches = False
        self.failures = RuleBook()


def with_relay(app: Onceward, only: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of consumers to run, with that of the relay: what they send must not wait for another run."""
    relays = app.settings.relay and app.settings.database is not None
    return (*only, RELAY) if only and relays and RELAY not in only else only


def all_consumers(app: Onceward, only: Sequence[str] = ()) -> list[Consumer]:
    """Return the consumers of an app with these names, or all; and the relay of its outbox, if it has a database.

    Every run relays, because whatever its consumers send would wait otherwise, and an idle relay costs one look at the
    database in a second.
    """
    consumers = [*app.consumers.values()]
    if app.settings.database is not None and (app.settings.relay or RELAY in only):
        consumers.append(RelayConsumer(app))
    return [each for each in consumers if not only or each.name in only]
