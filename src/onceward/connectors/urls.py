"""Where messages come from and go to, by URL.

    sqlite:///orders.db?lease=30&max_deliveries=5           a queue in a file; sqlite:////var/lib/orders.db
    redis://localhost:6379/0/orders?group=billing           a stream of a Redis database (0 may be left out); rediss://
    boundary+http://localhost:7700?consumer=billing         a boundary, under a durable name; boundary+https:// with
                                                            ca=…&cert=…&key=…; a sink has from_zone=…&to_zone=…
    memory://orders                                         within this process, for tests

and what installed packages add: see `onceward.connectors.registry`. After the question mark are the settings of the
connector, by the names that its class has. A URL is checked as a whole when it is read; nothing is opened then.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.registry import find_scheme, scheme_names
from onceward.connectors.reports import SourceCounts, SourceFacts
from onceward.connectors.scheme import LEASE_SETTINGS, Scheme
from onceward.errors import ConfigurationError

CREDENTIALS = re.compile(r"(?i)(pass|pwd|secret|token|credential)")
"""Names of settings whose values are never shown."""
WITHOUT_PASSWORDS = ("sqlite", "memory")
"""Schemes of paths and names, in which an @ is part of the name."""


class Address:
    """A URL that names a source, taken apart. Its text is without a password."""

    def __init__(self, url: str, *, sink: bool = False) -> None:
        self.url = url
        self.sink = sink
        self.scheme = url.partition("://")[0] if isinstance(url, str) and "://" in url else ""
        """The name of it, as in `redis`."""
        self._scheme = self._find_scheme()
        try:
            parts = urlsplit(url)
            self.port = parts.port
        except ValueError:  # whose text may quote a password
            self.refuse(
                "not a valid URL: the port is not a number, or the host is missing; / ? # @ of a password are written "
                "%2F %3F %23 %40"
            )
        if parts.fragment:
            self.refuse("it has a #; write %23 where that is part of a name or a password")
        self.netloc = parts.netloc
        self.hostname = parts.hostname or ""
        self.path = unquote(parts.path)
        self.place = f"{parts.netloc}{self.path}"
        self.settings = self._convert(parts.query)
        """By name, converted as the scheme says. Those that are not in the URL are left out."""
        self._check_lease()
        self._scheme.check(self)

    @property
    def queue(self) -> tuple[str, ...]:
        """The same for two consumers that take each other's messages."""
        divides = [name for name, setting in self._scheme.settings.items() if setting.divides]
        return (self.scheme, self.place, *(str(self.settings.get(name, "")) for name in divides))

    @property
    def role(self) -> str:
        return "sink" if self.sink else "source"

    @property
    def in_process(self) -> bool:
        """Whether only this process sees its messages."""
        return self._scheme.in_process

    @property
    def origin(self) -> str:
        """Where it is, without settings: dead letters go by it."""
        return str(self).partition("?")[0]

    def open(self, *, asynchronous: bool) -> Any:
        """A connector that the caller closes."""
        return self._scheme.open(self, asynchronous=asynchronous)

    def facts(self) -> SourceFacts:
        """What its connector can say about it; it may ask a server, and changes nothing."""
        return SourceFacts() if self._scheme.facts is None else self._scheme.facts(self)

    def counts(self) -> SourceCounts:
        """What its connector can count there; it may ask a server, and changes nothing."""
        if self._scheme.counts is None:
            return SourceCounts(untold={"appended": f"the connector of {self.scheme}:// does not count"})
        return self._scheme.counts(self)

    def refuse(self, problem: str) -> NoReturn:
        """Raise the error that says what is wrong with this URL, and what to write instead."""
        raise ConfigurationError(f"the {self.role} {shown_url(self.url)!r}: {problem}")

    def __str__(self) -> str:
        return shown_url(self.url)

    def _find_scheme(self) -> Scheme:
        found = find_scheme(self.scheme) if self.scheme else None
        if found is None:
            raise ConfigurationError(
                f"{shown_url(str(self.url))!r} is not a {self.role}: its URL begins with "
                f"{', '.join(f'{name}://' for name in scheme_names())}"
            )
        return found

    def _convert(self, query: str) -> dict[str, Any]:
        takes = self._scheme.settings
        settings: dict[str, Any] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in takes:
                has = ", ".join(sorted(takes)) or "none"
                self.refuse(f"{self.scheme} has no setting {name!r}; it has {has}")
            if name in settings:
                self.refuse(f"it has {name} twice; leave out one of them")
            try:
                settings[name] = takes[name].convert(value)
            except ValueError:
                shown = "***" if CREDENTIALS.search(name) else repr(value)
                self.refuse(f"{name} must be {takes[name].expects}, not {shown}")
            if not value:
                self.refuse(f"{name} is empty; give it a value, or leave it out")
        return settings

    def _check_lease(self) -> None:
        takes = self._scheme.settings
        ours = {name for name, setting in LEASE_SETTINGS.items() if takes.get(name) is setting}
        try:
            LeaseRules(**{name: value for name, value in self.settings.items() if name in ours})
        except ConfigurationError as error:
            self.refuse(str(error))


def shown_url(url: str) -> str:
    """Without passwords, even if it is not a valid URL."""
    head, question, query = url.partition("?")
    scheme, colon, rest = head.partition("://")
    user, at, host = rest.rpartition("@")
    if at and scheme not in WITHOUT_PASSWORDS:
        name, has_password, _ = user.partition(":")
        rest = f"{name}:***@{host}" if has_password else f"{user}@{host}"
    shown = "&".join(_shown_setting(each) for each in query.split("&"))
    return f"{scheme}{colon}{rest}{question}{shown}"


def _shown_setting(setting: str) -> str:
    name, equals, value = setting.partition("=")
    return f"{name}{equals}{'***' if CREDENTIALS.search(name) else value}"
