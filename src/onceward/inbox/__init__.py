"""The consumer contract: each event's effects happen once, atomically, whatever arrives twice or crashes.

`Contract` says what a consumer promises; `Inbox` (in asyncio `AsyncInbox`) enforces it: under the engine, where a task
with a `contract` gets `process_transaction(self, transaction, session)`, or on its own with
`inbox.process(contract, event, handler)`.

Delivery is at least once. Writes through the session happen once; calls to other systems happen at least once, with a
stable idempotency key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onceward.durations import days, hours, minutes
from onceward.inbox.contract import Contract
from onceward.inbox.effects import NOT_DONE, Done
from onceward.inbox.errors import (
    Breach,
    Busy,
    ContractError,
    DatabaseUnavailableError,
    EffectError,
    EffectInDoubtError,
    EffectRefused,
    LeaseLostError,
    Parked,
    UnprovenConsumerError,
    UnregisteredConsumerError,
)
from onceward.inbox.event import Event
from onceward.inbox.inbox import Inbox
from onceward.inbox.inbox_asyncio import AsyncInbox
from onceward.inbox.purge.purge import PurgeInProgressError, PurgeReport
from onceward.inbox.result import Handling, Result
from onceward.inbox.sessions import InboxSession
from onceward.storage.clocks import ClockDoubtError

if TYPE_CHECKING:
    from onceward.inbox.sessions.session_asyncio import AsyncInboxSession

__all__ = [
    "NOT_DONE",
    "AsyncInbox",
    "AsyncInboxSession",
    "Breach",
    "Busy",
    "ClockDoubtError",
    "Contract",
    "ContractError",
    "DatabaseUnavailableError",
    "Done",
    "EffectError",
    "EffectInDoubtError",
    "EffectRefused",
    "Event",
    "Handling",
    "Inbox",
    "InboxSession",
    "LeaseLostError",
    "Parked",
    "PurgeInProgressError",
    "PurgeReport",
    "Result",
    "UnprovenConsumerError",
    "UnregisteredConsumerError",
    "days",
    "hours",
    "minutes",
]


def __getattr__(name: str) -> Any:
    # Imported lazily: SQLAlchemy's asyncio part needs greenlet, which comes with the extra onceward[asyncio].
    if name == "AsyncInboxSession":
        from onceward.inbox.sessions.session_asyncio import AsyncInboxSession

        return AsyncInboxSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
