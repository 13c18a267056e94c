"""An operator's decision to skip a fact that blocks a link: recorded at the source, before its cursor passes the fact.

It is an object there: as durable as the facts, immutable, and moved with them by `copy`. The link reads it when it
continues, so the log of the receiving zone says who skipped what, and why.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from onceward.boundary.canonical import content_digest
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.errors import BoundaryError, ObjectConflict
from onceward.boundary.model import StoredFact
from onceward.errors import OncewardError

BUCKET = "skipped-facts"


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A fact that a link leaves out permanently."""

    consumer: str
    offset: int
    """At the source."""
    message_id: str
    digest: str
    """Of its content."""
    reason: str
    operator: str
    at: str


def key_of(consumer: str, offset: int) -> str:
    return f"{consumer}/{offset}.json"


async def skip(
    client: AsyncBoundaryClient, consumer: str, fact: StoredFact, *, reason: str, operator: str
) -> Skipped:
    """Record the decision, then move the cursor past the fact. Safe to repeat with the same reason if interrupted."""
    decision = Skipped(
        consumer=consumer,
        offset=fact.offset,
        message_id=fact.message_id,
        digest=content_digest(fact.envelope, fact.fact).hex(),
        reason=reason,
        operator=operator,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    key = key_of(consumer, fact.offset)
    try:
        await client.put(BUCKET, key, msgspec.json.encode(decision), "application/json")
    except ObjectConflict:
        recorded = await find_skip(client, consumer, fact.offset)
        if recorded is None or recorded.reason != reason:
            raise OncewardError(
                f"object {BUCKET}/{key} already records another reason to skip offset {fact.offset}: "
                f"{'it cannot be read' if recorded is None else repr(recorded.reason)}; repeat with that reason"
            ) from None
        decision = recorded
    await client.confirm(consumer, fact.offset)
    return decision


async def find_skip(client: AsyncBoundaryClient, consumer: str, offset: int) -> Skipped | None:
    """Return the recorded decision; None if there is none, or it cannot be read now."""
    try:
        content, _ = await client.get(BUCKET, key_of(consumer, offset))
        return msgspec.json.decode(content, type=Skipped)
    except (BoundaryError, msgspec.DecodeError):
        return None
