"""Whether NATS calls fsync before it acknowledges, read from its servers' monitoring. A client cannot ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import ParseResult
from urllib.request import urlopen

import msgspec

from onceward.boundary.store import StoreDurability

MONITORING = 8222
"""The usual port of a server's monitoring."""
WAIT = 0.5
"""Seconds for the answer of one server."""
SYNC_ALWAYS = "set `jetstream { sync_interval: always }` in the configuration of every NATS server"


class _Config(msgspec.Struct):
    sync_always: bool = False


class _JetStream(msgspec.Struct):
    config: _Config


class _Varz(msgspec.Struct):
    """The part of /varz that is used here."""

    port: int
    jetstream: _JetStream


async def durability_of(servers: Sequence[ParseResult], monitoring: int) -> StoreDurability:
    """Ask all servers: each may have replicas of the streams."""
    answers = await asyncio.gather(*(asyncio.to_thread(_syncs_always, each, monitoring) for each in servers))
    if False in answers:
        return StoreDurability(
            "process_crash",
            "the boundary's store is NATS without `sync_interval: always`: NATS acknowledges facts before they are on "
            "disk, so a machine that crashes or loses power can lose facts that were acknowledged, also with replicas",
            SYNC_ALWAYS,
        )
    if answers and all(answers):
        return StoreDurability(
            "machine_crash",
            "the boundary's store is NATS with `sync_interval: always`: a fact is on disk first",
        )
    return StoreDurability(
        None,
        "not checked whether the boundary's store, NATS, has `sync_interval: always`; without it, a machine that "
        f"crashes can lose facts that were acknowledged; its monitoring does not answer on port {monitoring}",
        f"{SYNC_ALWAYS}, and `http: {monitoring}`, which shows it; `?monitoring=PORT` in the store's URL names another "
        "port",
    )


def _syncs_always(server: ParseResult, monitoring: int) -> bool | None:
    """Return None if that cannot be found out."""
    host = f"[{server.hostname}]" if ":" in (server.hostname or "") else server.hostname
    try:
        with urlopen(f"http://{host}:{monitoring}/varz", timeout=WAIT) as answer:
            found = msgspec.json.decode(answer.read(), type=_Varz)
    except (OSError, ValueError):
        return None
    return found.jetstream.config.sync_always if found.port == server.port else None
