"""Where messages come from and go to, by URL.

    sqlite:///orders.db?lease=30&max_deliveries=5           a queue in a file; sqlite:////var/lib/orders.db
    sqlite:///shop.db?queue=orders                          a queue in the application's database
    redis://localhost:6379/0/orders?group=billing           a stream of a Redis database (0 may be left out); rediss://
    postgresql://user@localhost/shop/orders?lease=30        a queue in a database; or postgresql://localhost/shop?queue=orders
    nats://localhost:4222/ORDERS?consumer=billing           a JetStream stream, under a durable name; tls:// with
                                                            creds=…, or ca=…&cert=…&key=…
    boundary+http://localhost:7700?consumer=billing         a boundary, under a durable name; boundary+https:// with
                                                            ca=…&cert=…&key=…; a sink has from_zone=…&to_zone=…
    memory://orders                                         within this process, for tests

Installed packages may add more: see `onceward.connectors.registry`. After the question mark come the settings of the
connector, by the names of its class's parameters. Reading a URL checks all of it, and opens nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

from onceward._secrets import MASK, mask_url, names_secret, remember
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.registry import find_scheme, scheme_names
from onceward.connectors.reports import SourceBacklog, SourceCounts, SourceFacts
from onceward.connectors.scheme import LEASE_SETTINGS, Scheme
from onceward.errors import ConfigurationError
from onceward.telemetry.conventions import Destination

if TYPE_CHECKING:
    from sqlalchemy import Connection


GROUPS = {"redis": "onceward", "nats": "onceward"}
"""The group or durable name of a consumer whose URL names none, by the system."""
SYSTEMS = {
    "rediss": "redis",
    "postgres": "postgresql",
    "tls": "nats",
    "boundary+http": "onceward_boundary",
    "boundary+https": "onceward_boundary",
}
"""The `messaging.system` of schemes whose name says something else."""


class Address:
    """A parsed URL of a source or sink. `str()` hides its passwords."""

    def __init__(self, url: str, *, sink: bool = False) -> None:
        if isinstance(url, str):
            remember(url)
        self.url = url
        self.sink = sink
        self.scheme = url.partition("://")[0] if isinstance(url, str) and "://" in url else ""
        """Its name, as in `redis`."""
        self._scheme = self._find_scheme()
        try:
            parts = urlsplit(url)
            self.port = parts.port
        except ValueError:  # its message may quote a password
            self.refuse(
                "not a valid URL: the port is not a number, or the host is missing; write / ? # @ in a password as "
                "%2F %3F %23 %40"
            )
        if parts.fragment:
            self.refuse("it has a #; write %23 if it is part of a name or a password")
        self.netloc = parts.netloc
        self.hostname = parts.hostname or ""
        self.path = unquote(parts.path)
        self.place = f"{parts.netloc}{self.path}"
        self.settings = self._convert(parts.query)
        """Converted values of the settings in the URL, by name."""
        self._check_lease()
        self._scheme.check(self)

    @property
    def queue(self) -> tuple[str, ...]:
        """Equal for two consumers that would take each other's messages."""
        identity = self._scheme.identity(self)
        if identity is not None:
            return (identity,)
        return (self.scheme, self.place, *(str(self.settings.get(name, "")) for name in self._divides))

    @property
    def _divides(self) -> list[str]:
        return [name for name, setting in self._scheme.settings.items() if setting.divides]

    @property
    def role(self) -> str:
        return "sink" if self.sink else "source"

    @property
    def keeps_order(self) -> bool:
        """Whether its connectors can deliver only the first message of each key."""
        return self._scheme.keeps_order

    @property
    def in_process(self) -> bool:
        """Whether its messages are visible only inside this process."""
        return self._scheme.in_process

    @property
    def destination(self) -> Destination:
        """The messaging system, the queue, stream or log in it, and the group, as spans show them."""
        system = SYSTEMS.get(self.scheme, self.scheme)
        name = self.settings.get("queue") or self.path.strip("/").rpartition("/")[2] or self.hostname
        group = None
        if not self.sink:
            given = (self.settings.get(each) for each in self._divides)
            group = next((str(each) for each in given if each is not None), GROUPS.get(system))
        return Destination(system, str(name), group)

    @property
    def origin(self) -> str:
        """The URL without settings: dead letters are stored under it."""
        return self._scheme.identity(self) or str(self).partition("?")[0]

    def open(self, *, asynchronous: bool) -> Any:
        """Open a connector that the caller closes."""
        return self._scheme.open(self, asynchronous=asynchronous)

    async def open_async(self) -> Any:
        """Open a connector for asyncio that the caller closes, without blocking the event loop."""
        if not self._scheme.waits:
            return self.open(asynchronous=True)
        opening = asyncio.ensure_future(asyncio.to_thread(self.open, asynchronous=True))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise

    def facts(self) -> SourceFacts:
        """Return what its connector knows about it; may query a server, and changes nothing."""
        return SourceFacts() if self._scheme.facts is None else self._scheme.facts(self)

    def counts(self) -> SourceCounts:
        """Return what its connector can count; may query a server, and changes nothing."""
        if self._scheme.counts is None:
            return SourceCounts(notes={"appended": f"the connector of {self.scheme}:// does not count"})
        return self._scheme.counts(self)

    def arrivals(self) -> SourceCounts:
        """Return what a sink has had, for every consumer of it."""
        return self.counts() if self._scheme.arrivals is None else self._scheme.arrivals(self)

    def backlog(self) -> SourceBacklog:
        """Return what waits in it now; may query a server, and changes nothing."""
        return SourceBacklog() if self._scheme.backlog is None else self._scheme.backlog(self)

    def joins(self, connection: Connection) -> bool:
        """Whether it is in the database of this connection, so a message leaves it in its handler's transaction."""
        return self._scheme.joins is not None and self._scheme.joins(self, connection)

    @property
    def connections(self) -> int:
        """How many connections to a PostgreSQL its connector opens at most."""
        return self._scheme.connections

    def refuse(self, problem: str) -> NoReturn:
        """Raise `ConfigurationError`: what is wrong with this URL, and what to write instead."""
        raise ConfigurationError(f"{self.role} {mask_url(self.url)!r}: {problem}")

    def __str__(self) -> str:
        return mask_url(self.url)

    def _find_scheme(self) -> Scheme:
        found = find_scheme(self.scheme) if self.scheme else None
        if found is None:
            raise ConfigurationError(
                f"{mask_url(str(self.url))!r} is not a {self.role}; start its URL with one of "
                f"{', '.join(f'{name}://' for name in scheme_names())}"
            )
        return found

    def _convert(self, query: str) -> dict[str, Any]:
        takes = self._scheme.settings
        settings: dict[str, Any] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in takes and "@" in query:  # the name may be the rest of a password
                self.refuse(
                    "it has an @ after its first ?, and no such settings; write a ? in a password as %3F"
                )
            if name not in takes:
                has = ", ".join(sorted(takes)) or "none"
                self.refuse(f"{self.scheme} has no setting {name!r}; it has {has}")
            if name in settings:
                self.refuse(f"it has {name} twice; remove one of them")
            try:
                settings[name] = takes[name].convert(value)
            except ValueError:
                shown = MASK if names_secret(name) or "@" in value else repr(value)
                self.refuse(f"{name} must be {takes[name].expects}, not {shown}")
            if not value:
                self.refuse(f"{name} is empty; give it a value, or remove it")
        return settings

    def _check_lease(self) -> None:
        try:
            self._lease_rules()
        except ConfigurationError as error:
            self.refuse(str(error))

    def _lease_rules(self) -> LeaseRules:
        takes = self._scheme.settings
        ours = {name for name, setting in LEASE_SETTINGS.items() if takes.get(name) is setting}
        return LeaseRules(**{name: value for name, value in self.settings.items() if name in ours})

    @property
    def rules(self) -> LeaseRules | None:
        """When it delivers a message again, and when it buries it; None if it does not say."""
        takes = self._scheme.settings
        return (
            self._lease_rules() if takes.get("max_deliveries") is LEASE_SETTINGS["max_deliveries"] else None
        )


_closing: set[asyncio.Task[None]] = set()


def _close_unused(opening: asyncio.Future[Any]) -> None:
    """Who wanted it was canceled meanwhile."""
    if not opening.cancelled() and opening.exception() is None:
        closing = asyncio.ensure_future(opening.result().close_async())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
