"""What an operator decided about a fact that held a link: kept at the source, before its cursor passes the fact.

It is an object there, and so as durable as the facts, never changed, and moved with them by `copy`. The link reads it
when it goes on, so that the log of the receiving zone says who has left out what, and why.
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
    """A fact that a link has left out for good."""

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
    """Keep the decision, and go on behind the fact. Repeat it, with the same reason, if it broke off in between."""
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
        kept = await decided(client, consumer, fact.offset)
        if kept is None or kept.reason != reason:
            raise OncewardError(
                f"object {BUCKET}/{key} says already why offset {fact.offset} is skipped, in other words: "
                f"{'it cannot be read' if kept is None else repr(kept.reason)}; repeat it with that reason"
            ) from None
        decision = kept
    await client.confirm(consumer, fact.offset)
    return decision


async def decided(client: AsyncBoundaryClient, consumer: str, offset: int) -> Skipped | None:
    """None if nobody has kept anything, or it cannot be had now."""
    try:
        content, _ = await client.get(BUCKET, key_of(consumer, offset))
        return msgspec.json.decode(content, type=Skipped)
    except (BoundaryError, msgspec.DecodeError):
        return None
