"""The outbox: messages that a transaction publishes, and the relay that sends them once it has committed.

`app.outbox(connection).send(target, payload)` writes a message in your transaction, `session.send(target, payload)` in
that of a handler. `onceward run` relays them, at least once and with the same id, in order within a key.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onceward.outbox.delay import Delayed
from onceward.outbox.errors import OutboxError
from onceward.outbox.outbox import Outbox

if TYPE_CHECKING:
    from onceward.outbox.sender import OutboxSender
    from onceward.outbox.sender_asyncio import AsyncOutboxSender

__all__ = ["AsyncOutboxSender", "Delayed", "Outbox", "OutboxError", "OutboxSender"]

_LAZY = {"AsyncOutboxSender": "sender_asyncio", "OutboxSender": "sender"}
"""They need SQLAlchemy, which an app without a database does not."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
