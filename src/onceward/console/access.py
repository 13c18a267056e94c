"""Who may use the console, and for what.

Without users, a proxy or a callable, only this machine may: the request comes from a loopback address, and names one as
its host, so a page of another site cannot reach it through a name that it points here.
"""

from __future__ import annotations

import getpass
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple

from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from onceward.console.users import UsersFile

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Role(IntEnum):
    VIEWER = 1
    """Sees everything, payloads redacted."""
    OPERATOR = 2
    """Dry runs, redrives, edits, holds and releases, pauses and resumes, ends worker processes, too."""
    ADMIN = 3
    """Discards, and sees payloads as they are, too."""


class User(NamedTuple):
    name: str
    role: Role


Authenticate = Callable[["HTTPConnection"], "Awaitable[User | None] | User | None"]


class Access:
    """How users are recognized. Give one of `users`, `header` with `proxies`, or `authenticate`; or none of them, for
    this machine alone."""

    def __init__(
        self,
        *,
        users: UsersFile | None = None,
        header: str | None = None,
        role_header: str | None = None,
        proxies: Sequence[str] = (),
        authenticate: Authenticate | None = None,
    ) -> None:
        if sum(each is not None for each in (users, header, authenticate)) > 1:
            raise ConfigurationError(
                "the console knows its users from one place: a users file, a proxy's header or a callable"
            )
        if (header is None) != (not proxies):
            raise ConfigurationError(
                "a trusted header needs the addresses of the proxies that set it, and they need the header: anybody "
                "else could send it, too"
            )
        if role_header is not None and header is None:
            raise ConfigurationError("a role header needs a user header: without it, nobody has to log in")
        self.users = users
        self.header = header
        self.role_header = role_header
        self.authenticate = authenticate
        try:
            self.proxies = [ip_network(each, strict=False) for each in proxies]
        except ValueError as error:
            raise ConfigurationError(f"proxies must be addresses or networks: {error}") from None
        for each in self.proxies:
            if each.prefixlen == 0:
                raise ConfigurationError(
                    f"the proxy {each} is every address, so anybody could claim to be any user; list the addresses of "
                    "your proxies"
                )

    @property
    def is_open(self) -> bool:
        """Whether it asks for nobody's name, and therefore answers this machine alone."""
        return self.users is None and self.header is None and self.authenticate is None

    def is_trusted_proxy(self, address: str | None) -> bool:
        try:
            found = ip_address(address or "")
        except ValueError:
            return False
        return any(found in network for network in self.proxies)


def local_user() -> User:
    """The account that runs the console, for a browser on the same machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "local"
    return User(f"{name} (console on this machine)", Role.ADMIN)


def is_loopback(address: str | None) -> bool:
    """Whether this is an address of this machine, by which no other can reach it."""
    try:
        return ip_address((address or "").strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def names_loopback(host: str) -> bool:
    """Whether a Host header names this machine: anything else may be a stranger's name that points here."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.lower() in LOOPBACK_NAMES
