"""Time for a Redis stream, whose server has its own clock."""

from __future__ import annotations

import redis


def age(client: redis.Redis, stream: str, seconds: float) -> None:
    """Make every pending entry look as if it had been delivered so much earlier."""
    for each in client.xpending_range(stream, "onceward", "-", "+", 1000):
        client.xclaim(
            stream,
            "onceward",
            each["consumer"],
            0,
            [each["message_id"]],
            idle=each["time_since_delivered"] + int(seconds * 1000),
            retrycount=each["times_delivered"],
            justid=True,
        )
