"""What an operator wants to know of a boundary beside its cursors: room, retention, links to other zones, artifacts.

What the store does not say in time is null.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from onceward.boundary.boundary import Boundary
from onceward.boundary.links.report import LinkState
from onceward.boundary.model import STREAMS, ObjectRef
from onceward.boundary.store import ObjectUsage

LISTED = 100
"""Artifacts that are named."""


class LogDetails(msgspec.Struct):
    bytes: int | None
    capacity_bytes: int | None
    """None for no limit."""
    full_at_bytes: int | None
    """From which on a new fact is refused, or the oldest are removed."""
    drops_oldest: bool


class ArtifactDetails(msgspec.Struct):
    usage: ObjectUsage | None
    most: int
    most_bytes: int
    first: Sequence[ObjectRef] | None
    """Some of them, at most `LISTED`, in the order of the store."""


class BoundaryDetails(msgspec.Struct):
    zone: str
    """Empty if it has no name."""
    log: LogDetails
    retention_seconds: dict[str, float]
    """By class."""
    expiry_halted: str
    """Why nothing expires now; empty if facts expire as usual."""
    links: Sequence[LinkState]
    artifacts: ArtifactDetails


def details_of(
    boundary: Boundary,
    zone: str,
    links: Sequence[LinkState],
    size: int | None,
    usage: ObjectUsage | None,
    artifacts: Sequence[ObjectRef] | None,
) -> BoundaryDetails:
    settings = boundary.settings
    log = LogDetails(size, settings.capacity_bytes, boundary.fill.limit, boundary.fill.may_drop)
    kept = {stream: settings.retention_seconds(stream) for stream in STREAMS}
    stored = ArtifactDetails(usage, settings.max_objects, settings.max_object_bytes, artifacts)
    return BoundaryDetails(zone, log, kept, boundary.expiry_halted, links, stored)


async def first_artifacts(boundary: Boundary) -> list[ObjectRef]:
    found = []
    async for ref in boundary.store.objects.refs():
        found.append(ref)
        if len(found) == LISTED:
            break
    return found
