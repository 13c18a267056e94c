"""Whether NATS calls fsync before it acknowledges, read from its servers' monitoring. A client cannot ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import ParseResult
from urllib.request import urlopen

import msgspec

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


async def syncs_always(servers: Sequence[ParseResult], monitoring: int) -> bool | None:
    """Ask all servers: each may have replicas of the streams. Return None if one does not say."""
    answers = await asyncio.gather(*(asyncio.to_thread(_syncs_always, each, monitoring) for each in servers))
    if False in answers:
        return False
    return True if answers and all(answers) else None


def _syncs_always(server: ParseResult, monitoring: int) -> bool | None:
    """Return None if that cannot be found out."""
    host = f"[{server.hostname}]" if ":" in (server.hostname or "") else server.hostname
    try:
        with urlopen(f"http://{host}:{monitoring}/varz", timeout=WAIT) as answer:
            found = msgspec.json.decode(answer.read(), type=_Varz)
    except (OSError, ValueError):
        return None
    return found.jetstream.config.sync_always if found.port == server.port else None
