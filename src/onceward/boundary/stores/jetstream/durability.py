"""What a boundary on NATS survives."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import ParseResult

from onceward._nats.durability import SYNC_ALWAYS, syncs_always
from onceward.boundary.store import StoreDurability


async def durability_of(servers: Sequence[ParseResult], monitoring: int) -> StoreDurability:
    syncs = await syncs_always(servers, monitoring)
    if syncs is False:
        return StoreDurability(
            "process_crash",
            "the boundary's store is NATS without `sync_interval: always`: NATS acknowledges facts before they are on "
            "disk, so a machine that crashes or loses power can lose facts that were acknowledged, also with replicas",
            SYNC_ALWAYS,
        )
    if syncs:
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
