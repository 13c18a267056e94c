"""Sends on a connection of the caller, in asyncio."""

# make faces writes sender.py, with
#   run_blocking: self._sending

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from onceward.outbox.connections import async_port
from onceward.outbox.outbox import ConnectionSends, Outbox
from onceward.outbox.targets import Target


class AsyncOutboxSender:
    """What `app.outbox(connection)` returns: messages that commit with the transaction of the connection."""

    def __init__(self, outbox: Outbox, connection: Any) -> None:
        self._sending = ConnectionSends(outbox, connection, async_port)

    async def send(
        self,
        target: Target,
        payload: Any,
        *,
        id: str | None = None,
        key: str | None = None,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> str:
        """Publish the payload if, and when, the transaction commits. Returns the id of the message.

        `target` is a consumer or producer function of the app, or a URL. Messages with the same `key` and target go out
        in the order in which they were sent. `delay` (a timedelta, or seconds) or `at` (a datetime with a time zone)
        hold it back. A message with an `id` that is in the outbox already is not written again. `headers` become
        the metadata of the transaction.

        Raises `OutboxError` or `PayloadError` if it cannot be sent like this; nothing is written then.
        """
        return await self._sending.send(target, payload, id=id, key=key, delay=delay, at=at, headers=headers)

    async def cancel(self, id: str) -> bool:
        """Remove a message that no relay has tried to publish yet. Returns whether it was removed: then it is not
        published, if the transaction commits."""
        return await self._sending.cancel(id)
