"""What the sessions of both kinds refuse."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.db.guests.guest import Guest
    from onceward.inbox.effects import Claim

NOT_EFFECTFUL = (
    "the contract of this consumer says mode='transactional': its handler runs inside a database transaction, which "
    "cannot include an outside call; set mode='effectful' to have effects recorded before they are called"
)
NOT_DECIDED = (
    "effects are not allowed before the inbox knows that the event is new; call them in the running handler"
)
WRITTEN = (
    "effects come before writes: this session has uncommitted changes, and would hold them, and the database's locks, "
    "during an outside call. Call the effects first, then write"
)
IN_CALL = (
    "the session cannot be used inside the call of an effect: a retry does not repeat the call, so what it writes "
    "would be lost. Return from the call what you need, and write after session.effect(…)"
)
calling: ContextVar[tuple[Claim, ...]] = ContextVar("onceward_calling", default=())
"""The claims for which the code that runs here is the call of an effect."""
LOST = "the lease on event {} was lost, and another worker may have it; this attempt commits nothing"
NO_OUTBOX = (
    "nothing was sent: this session has no outbox; a consumer of an app with a database has one, and an inbox of your "
    "own gets it with inbox.set_outbox(app.outbox), or a class of consumers with outbox = app.outbox"
)


class Sends(Protocol):
    """The messages that a handler sends in one attempt: see `onceward.outbox`."""

    def message(
        self, target: Any, payload: Any, *, id: str | None, name: str | None, **given: Any
    ) -> Any: ...
    def write(self, transaction: DbTransaction, made: Any) -> str: ...


class NoSends:
    """Those of a session without an outbox."""

    def message(self, target: Any, payload: Any, *, id: str | None, name: str | None, **given: Any) -> Any:
        raise ConfigurationError(NO_OUTBOX)

    def write(self, transaction: DbTransaction, made: Any) -> str:
        raise ConfigurationError(NO_OUTBOX)


NO_SENDS = NoSends()


def has_written(transaction: DbTransaction) -> bool:
    return transaction.backend.has_written(transaction.connection)


def dismiss(transaction: DbTransaction, guests: Sequence[Guest]) -> None:
    """Have the guests forget this transaction, which ends: the next has another connection."""
    for each in guests:
        each.let_go()
