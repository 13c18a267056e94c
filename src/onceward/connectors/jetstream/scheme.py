"""`nats://localhost:4222/ORDERS?consumer=billing`: a JetStream stream and its durable consumer."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from onceward.connectors.reports import SourceBacklog, SourceCounts, SourceFacts
from onceward.connectors.scheme import LEASE_SETTINGS, Scheme, Setting, required_package
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.connectors.urls import Address

FILES = ("creds", "ca", "cert", "key")
FOR_CONNECTIONS = {*FILES, "monitoring"}
"""Settings that are not the queue's."""
EXAMPLE = "nats://localhost:4222/ORDERS?consumer=billing"
WRONG_IN_NAMES = frozenset(" .*>/\\")


def server_of(address: Address) -> str:
    """Return the URL of NATS itself, without a password: see `options_of`."""
    return f"{address.scheme}://{address.netloc.rpartition('@')[2]}"


def stream_of(address: Address) -> str:
    return address.path.strip("/")


def consumer_of(address: Address) -> str:
    name: str = address.settings.get("consumer", "onceward")
    return name


def check(address: Address) -> None:
    given = address.settings
    if not address.hostname:
        address.refuse(f"it names no host; write {EXAMPLE}")
    if not stream_of(address):
        address.refuse(f"it names no stream; write {EXAMPLE}")
    for what, name in (("the stream", stream_of(address)), ("consumer", consumer_of(address))):
        if WRONG_IN_NAMES & set(name):
            address.refuse(f"{what} must be a name without spaces, dots, slashes, * and >, not {name!r}")
    if {"*", ">"} & set(given.get("subject", "").split(".")):
        address.refuse(f"subject must be a subject to publish to, without * and >, not {given['subject']!r}")
    if ("cert" in given) != ("key" in given):
        address.refuse("a certificate needs both cert and key")
    if {"ca", "cert"} & given.keys() and address.scheme != "tls":
        address.refuse("ca, cert and key need TLS; write tls://")


def options_of(address: Address) -> dict[str, Any]:
    """Return the arguments of `nats.connect` that the URL's settings stand for."""
    given, parts = address.settings, urlsplit(address.url)
    options: dict[str, Any] = {}
    if parts.username and parts.password is not None:
        options |= {"user": unquote(parts.username), "password": unquote(parts.password)}
    elif parts.username:
        options["token"] = unquote(parts.username)
    for name in FILES:
        if name in given and not Path(given[name]).is_file():
            raise ConfigurationError(
                f"{name} of the {address.role} {str(address)!r} is not a file: {given[name]}"
            )
    if "creds" in given:
        with required_package("cryptography", "nats"):
            import cryptography  # noqa: F401

            from onceward._nats.creds import credentials_of
        options |= credentials_of(given["creds"])
    if address.scheme == "tls":
        try:
            context = ssl.create_default_context(cafile=given.get("ca"))
            if "cert" in given:
                context.load_cert_chain(given["cert"], given["key"])
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"a certificate of the {address.role} {str(address)!r} cannot be read: {error}"
            ) from None
        options["tls"] = context
    return options


def open_stream(address: Address, *, asynchronous: bool) -> Any:
    with required_package("nats", "nats"):
        from onceward.connectors.jetstream import AsyncJetStreamConnector, JetStreamConnector

    settings = {name: value for name, value in address.settings.items() if name not in FOR_CONNECTIONS}
    kind: Any = AsyncJetStreamConnector if asynchronous else JetStreamConnector
    return kind(server_of(address), stream_of(address), options=options_of(address), **settings)


def facts(address: Address) -> SourceFacts:
    with required_package("nats", "nats"):
        from onceward.connectors.jetstream.durability import read_facts

    return read_facts(address)


def counts(address: Address) -> SourceCounts:
    with required_package("nats", "nats"):
        from onceward.connectors.jetstream.counts import count_stream

    return count_stream(address)


def arrivals(address: Address) -> SourceCounts:
    with required_package("nats", "nats"):
        from onceward.connectors.jetstream.counts import count_arrivals

    return count_arrivals(address)


def backlog(address: Address) -> SourceBacklog:
    with required_package("nats", "nats"):
        from onceward.connectors.jetstream.counts import read_backlog

    return read_backlog(address)


SCHEME = Scheme(
    names=("nats", "tls"),
    settings={
        **LEASE_SETTINGS,
        "consumer": Setting(divides=True),
        "subject": Setting(),
        **dict.fromkeys(FILES, Setting()),
        "monitoring": Setting(int, "a port number"),
    },
    check=check,
    open=open_stream,
    facts=facts,
    counts=counts,
    arrivals=arrivals,
    backlog=backlog,
)
