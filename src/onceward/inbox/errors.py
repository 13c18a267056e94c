"""What can go wrong between an event and a consumer's contract.

OncewardError
├── ConfigurationError
│   ├── UnregisteredConsumerError      a consumer that is not in the registry; it does not run
│   └── UnprovenConsumerError          a consumer without proof of its code; it does not run in production
├── TransactionException
│   └── ContractError                  this event and this contract do not fit; never retried
├── DatabaseUnavailableError           the inbox's database is away, read-only or out of room
├── LeaseLostError                     somebody else has the event now; nothing of this attempt may stay
├── EffectError                        an effect where none is allowed
└── EffectInDoubtError                 an effect was begun and nobody knows whether it happened
"""

from __future__ import annotations

from enum import StrEnum

from onceward.backoff import Backoff
from onceward.errors import ConfigurationError, OncewardError
from onceward.task.exceptions import ExceptionCategory, Postponed, TransactionException


class Breach(StrEnum):
    """In which way an event and a contract do not fit."""

    CONFLICT = "conflict"
    """The same id came before, with another payload."""
    TOO_OLD = "too_old"
    """Older than the dedup horizon: whether it was processed before is no longer known."""
    SCHEMA = "schema"
    """A newer schema version, one with no way to the current version, or an upcaster that failed."""
    PAYLOAD = "payload"
    """Not what the contract's model describes, or not data at all."""
    EVENT_TYPE = "event_type"
    """Not a type that the contract names."""
    ENVELOPE = "envelope"
    """A field of the event itself is missing, or of the wrong kind."""
    POISON = "poison"
    """Started too often without ever coming to an end."""
    GAP = "gap"
    """The events before it did not come in time."""


class DatabaseUnavailableError(OncewardError):
    """Nothing can be done for any event now. A fetch raises it, since what it would fetch could only go back."""


class ContractError(TransactionException):
    """An event that this consumer must not process. `kind` says why.

    Its category is always BUSINESS: the same event and the same contract give the same answer, so sources set
    it aside instead of trying again. The message never quotes the payload, since it is logged and stored.
    """

    category: ExceptionCategory = ExceptionCategory.BUSINESS
    kind: Breach
    tracking_id: str | None
    """Of the event; None where it has none that can be used."""

    def __init__(
        self,
        message: str,
        kind: Breach | str,
        tracking_id: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        # transaction_id stays open: the engine fills in the one that it knows this event by.
        super().__init__(message, ExceptionCategory.BUSINESS, cause=cause)
        self.kind = Breach(kind)
        self.tracking_id = tracking_id


class UnregisteredConsumerError(ConfigurationError):
    """A consumer that is not in the registry of its database. It does not run."""


class UnprovenConsumerError(ConfigurationError):
    """A consumer without valid evidence for its code. It does not run in production."""


class LeaseLostError(OncewardError):
    """The lease on an event ran out, or somebody else has claimed it. This attempt's writes are rolled back."""


class EffectError(OncewardError):
    """An effect was asked for where none is allowed, for example before it is known that the event is new."""


class EffectInDoubtError(OncewardError):
    """An effect was begun, and whether it happened is not known. `reconcile`, or a person, has to say."""


# Reasons to come again later. No failures: nothing is counted, nothing is acknowledged.


IN_A_MOMENT = Backoff(0.1, 1.0, jitter=0.8)
AT_ONCE = Backoff(0.25, 1.0, jitter=0.8)
SOON = Backoff(1.0, 1.0, jitter=0.8)
LATER = Backoff(1.5, 1.0, jitter=2 / 3)
"""How long an event waits that is busy: with jitter, so copies do not come back together."""


class Busy(Postponed):
    """Another copy of the event is in hand, or the database is; whoever has it may still roll back."""


class Parked(Postponed):
    """An earlier event of the same aggregate has not come yet."""
