"""`boundary+http://host:7700?consumer=billing`: the log of a boundary, under a durable name."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from onceward._secrets import mask, mask_url
from onceward._text import quantity
from onceward.connectors.reports import (
    ANSWER_SECONDS,
    CHECK_SERVER,
    Durability,
    ServerUnreachable,
    SourceBacklog,
    SourceCounts,
    SourceFacts,
    Survives,
)
from onceward.connectors.scheme import LEASE_SETTINGS, Scheme, Setting, required_package

if TYPE_CHECKING:
    from onceward.connectors.urls import Address

FILES = frozenset(("ca", "cert", "key"))
KEEPS = "facts are kept for a week, or as configured; a consumer that is away longer gets a report of what it missed"
SURVIVES = {"machine_crash": Survives.MACHINE_CRASH, "process_crash": Survives.PROCESS_CRASH}
FACTS = SourceFacts(redelivers=True, keeps_dead_letters=False)


def server_of(address: Address) -> str:
    """Return the boundary's own URL."""
    return f"{address.scheme.removeprefix('boundary+')}://{address.place.rstrip('/')}"


def check(address: Address) -> None:
    given = address.settings.keys()
    if not address.hostname:
        address.refuse("the host is missing; write boundary+http://localhost:7700?consumer=billing")
    if "@" in address.place.partition("/")[0]:
        address.refuse(
            "a user or password would not be sent; remove it; a boundary knows its peers by their certificates: write "
            "boundary+https:// with ca, cert and key"
        )
    if not address.sink and "consumer" not in given:
        address.refuse("a source needs a durable name for its cursor: add ?consumer=NAME")
    if address.sink and not given >= {"from_zone", "to_zone"}:
        address.refuse("a sink needs the zones that facts go from and to: add ?from_zone=HERE&to_zone=THERE")
    if 0 < len(given & FILES) < len(FILES):
        address.refuse("a certificate needs all of ca, cert and key")
    if given & FILES and not _has_tls(address):
        address.refuse("ca, cert and key need TLS; write boundary+https://")


def open_log(address: Address, *, asynchronous: bool) -> Any:
    with required_package("connectrpc", "boundary"), required_package("pyqwest", "boundary"):
        from onceward.boundary.client.client import BoundaryClient
        from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
        from onceward.boundary.tls import Tls
        from onceward.connectors.boundary.connector import OwningBoundaryConnector
        from onceward.connectors.boundary.connector_asyncio import AsyncOwningBoundaryConnector

    settings = dict(address.settings)
    consumer = settings.pop("consumer", None)
    tls = {name: settings.pop(name) for name in FILES & settings.keys()}
    url, files = server_of(address), Tls(**tls) if tls else None
    if asynchronous:
        return AsyncOwningBoundaryConnector(AsyncBoundaryClient(url, tls=files), consumer, **settings)
    return OwningBoundaryConnector(BoundaryClient(url, tls=files), consumer, **settings)


def facts(address: Address) -> SourceFacts:
    try:
        stats = read_stats(address)
    except ServerUnreachable as error:
        return msgspec.structs.replace(FACTS, unreachable=(str(error),))
    return msgspec.structs.replace(FACTS, durability=durability_of(stats))


def durability_of(stats: dict[str, Any]) -> Durability:
    """What the boundary reports about its store."""
    found = stats.get("durability")
    if not isinstance(found, dict):
        return Durability(
            None, "not checked how durable the store of the boundary is: its version does not report it"
        )
    return Durability(
        SURVIVES.get(str(found.get("survives"))), f"{found.get('why')}; {KEEPS}", str(found.get("advice", ""))
    )


def counts(address: Address) -> SourceCounts:
    stats = read_stats(address)
    name = address.settings["consumer"]
    offsets = {each["name"]: each["offset"] for each in stats["consumers"]}
    offset = offsets.get(name)
    confirmed, gone = offset or 0, stats["first"] - 1
    expired = max(gone - confirmed, 0)
    return SourceCounts(
        appended=stats["last"],
        done=confirmed,
        pending=stats["last"] - confirmed - expired,
        dead=0,
        dropped={"expired before it was confirmed": expired} if expired else {},
        has_copies=False,
        undelivered=min(gone, confirmed),
        notes={} if offset is not None else {"pending": f"{name} has never fetched: all facts are pending"},
        unknown=(_missed(name, expired, is_new=offset is None),) if expired else (),
        missing=_no_cursor(address, name, list(offsets)) if offset is None and offsets else None,
    )


def _missed(name: str, expired: int, *, is_new: bool) -> str:
    facts = quantity(expired, "fact")
    if is_new:
        return f"{facts} had expired before {name} ever fetched: it has missed them, unless it had another name then"
    return f"{facts} expired before {name} confirmed them: it has missed those that it was to get"


def arrivals(address: Address) -> SourceCounts:
    """A boundary keeps one fact of an id, and does not list them."""
    return SourceCounts(appended=read_stats(address)["last"], has_copies=False)


def backlog(address: Address) -> SourceBacklog:
    stats = read_stats(address)
    ours = next((each for each in stats["consumers"] if each["name"] == address.settings["consumer"]), None)
    if ours is None:
        return SourceBacklog(waiting=stats["last"] - stats["first"] + 1, dead=0)
    return SourceBacklog(waiting=ours["backlog"], dead=0, oldest_age=ours.get("lag_seconds"))


def _no_cursor(address: Address, name: str, others: list[str]) -> str:
    return (
        f"the boundary at {address.origin} has no consumer {name!r}, only {', '.join(others)}; check ?consumer= of the "
        "source, or start it once"
    )


def read_stats(address: Address) -> dict[str, Any]:
    """Return the content of the boundary's /stats page. Raise `ServerUnreachable`."""
    return _read(address, "/stats", ("first", "last", "consumers"))


def read_details(address: Address) -> dict[str, Any]:
    """Return the content of the boundary's /details page. Raise `ServerUnreachable`."""
    return _read(address, "/details", ("zone", "log", "retention_seconds", "links", "artifacts"))


def _read(address: Address, path: str, fields: Sequence[str]) -> dict[str, Any]:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    page = f"{server_of(address)}{path}"
    try:
        with urlopen(page, timeout=ANSWER_SECONDS, context=_trust(address)) as answer:
            found: dict[str, Any] = json.load(answer)
            for name in fields:
                found[name]
            return found
    except HTTPError as error:
        with error:
            why = _message_in(error.read(10_000)) or f"{error.code} {error.reason}"
        raise ServerUnreachable(f"cannot read {mask_url(page)}: {why}; {CHECK_SERVER}") from None
    except (OSError, HTTPException) as error:
        raise ServerUnreachable(
            f"cannot read {mask_url(page)}: {mask(str(getattr(error, 'reason', error)))}; {CHECK_SERVER}"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise ServerUnreachable(f"{mask_url(page)} is not the page of a boundary; check its URL") from None


def _message_in(body: bytes) -> str:
    """Return what a boundary says that cannot read its store."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, LookupError, TypeError):
        return ""


def _has_tls(address: Address) -> bool:
    return address.scheme.endswith("https")


def _trust(address: Address) -> ssl.SSLContext | None:
    if not _has_tls(address):
        return None
    context = ssl.create_default_context(cafile=address.settings.get("ca"))
    if "cert" in address.settings:
        context.load_cert_chain(address.settings["cert"], address.settings["key"])
    return context


SCHEME = Scheme(
    names=("boundary+http", "boundary+https"),
    keeps_order=True,
    settings={
        **LEASE_SETTINGS,
        "consumer": Setting(divides=True),
        **dict.fromkeys(("from_zone", "to_zone", *FILES), Setting()),
    },
    check=check,
    open=open_log,
    facts=facts,
    counts=counts,
    arrivals=arrivals,
    backlog=backlog,
)
