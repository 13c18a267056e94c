"""The errors of an inbox, and the two reasons to try an event again later.

OncewardError
├── ConfigurationError
│   ├── UnregisteredConsumerError      the consumer is not in the registry; it does not run
│   └── UnprovenConsumerError          the consumer's code is not verified; it does not run in production
├── TransactionException
│   ├── ContractError                  the event violates the contract; never retried
│   │   └── EffectInDoubtError         an effect was begun, its outcome is unknown, and nothing may call it again
│   └── EffectRefused                  raised by you: an effect has certainly not happened
├── DatabaseUnavailableError           the inbox's database is down, read-only or out of space
├── LeaseLostError                     another worker owns the event now; this attempt is rolled back
└── EffectError                        an effect where none is allowed, or whose failure the handler caught

Postponed                              not a failure: nothing is counted, nothing is acknowledged
├── Busy                               another copy of the event, or the database, is in use
└── Parked                             an earlier event of the same aggregate has not arrived yet
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from onceward.backoff import Backoff
from onceward.errors import ConfigurationError, OncewardError
from onceward.task.exceptions import ExceptionCategory, Postponed, TransactionException

IN_A_MOMENT = Backoff(0.1, 1.0, jitter=0.8)
AT_ONCE = Backoff(0.25, 1.0, jitter=0.8)
SOON = Backoff(1.0, 1.0, jitter=0.8)
LATER = Backoff(1.5, 1.0, jitter=2 / 3)
"""How long a busy event waits; with jitter, so copies do not come back together."""


class Breach(StrEnum):
    """How an event violates a contract."""

    CONFLICT = "conflict"
    """The same id arrived before with another payload or event type."""
    TOO_OLD = "too_old"
    """Older than the dedup horizon, so whether it was processed before is no longer known."""
    SCHEMA = "schema"
    """The schema version is newer, no upcasters lead from it to the current one, or an upcaster failed."""
    PAYLOAD = "payload"
    """The payload does not match the contract's model, or cannot be encoded."""
    EVENT_TYPE = "event_type"
    """The contract does not name this type."""
    ENVELOPE = "envelope"
    """A field of the event itself is missing or invalid."""
    POISON = "poison"
    """Started too often without ever ending."""
    GAP = "gap"
    """The events before it did not arrive in time."""
    REPEATED_EFFECT = "repeated_effect"
    """Its handler used one name for two effects."""
    IN_DOUBT = "in_doubt"
    """Whether one of its effects has happened is unknown, and there is no answer."""


class DatabaseUnavailableError(OncewardError):
    """No event can be processed now. A fetch raises it, because it would have to return whatever it fetched."""


class ContractError(TransactionException):
    """This consumer must not process the event; `kind` says why.

    Its category is always BUSINESS: the same event and contract always give the same result, so sources set the event
    aside instead of retrying it. The message never quotes the payload, because it is logged and stored.
    """

    category: ExceptionCategory = ExceptionCategory.BUSINESS
    kind: Breach
    tracking_id: str | None
    """Of the event; None if it has no usable one."""

    def __init__(
        self,
        message: str,
        kind: Breach | str,
        tracking_id: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        # The engine fills in its own transaction_id.
        super().__init__(message, ExceptionCategory.BUSINESS, cause=cause)
        self.kind = Breach(kind)
        self.tracking_id = tracking_id


class UnregisteredConsumerError(ConfigurationError):
    """The consumer is not in the registry of its database, so it does not run."""


class UnprovenConsumerError(ConfigurationError):
    """The consumer has no valid evidence for its code, so it does not run in production."""


class LeaseLostError(OncewardError):
    """The lease on an event expired, or another worker claimed it. This attempt's writes are rolled back."""


class EffectError(OncewardError):
    """An effect was called where none is allowed, for example before the event is known to be new; or it failed, and
    the handler caught the error and returned."""


class EffectInDoubtError(ContractError):
    """An effect was begun, and its outcome is unknown. `reconcile`, or a person, has to find out.

    The event becomes a dead letter in doubt. `onceward inbox resolve` records what the provider says.
    """

    def __init__(self, message: str, tracking_id: str | None = None) -> None:
        super().__init__(message, Breach.IN_DOUBT, tracking_id)


class EffectRefused(TransactionException):
    """Raise it from the call of an effect, or from `reconcile`: the provider says that the effect has not happened.

    The effect is then not in doubt. The next attempt, or a redrive, calls it again with a new key, because providers
    repeat their answer to an old one. Never raise it for a timeout or a lost connection: they say nothing about the
    other side. Its category is BUSINESS, so the event becomes a dead letter; `category=ExceptionCategory.SYSTEM` has it
    retried, as for a provider that says "too many requests".
    """

    category: ExceptionCategory = ExceptionCategory.BUSINESS

    def __init__(self, message: str = "", *args: Any, **more: Any) -> None:
        super().__init__(message or "the provider refused it, and the handler gave no reason", *args, **more)


class Busy(Postponed):
    """Another copy of the event is in flight and may still roll back, or the database is locked or unavailable."""


class Parked(Postponed):
    """An earlier event of the same aggregate has not arrived yet."""
