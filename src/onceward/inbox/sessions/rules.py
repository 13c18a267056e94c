"""What the sessions of both kinds refuse."""

from __future__ import annotations

from onceward.db.transaction import DbTransaction

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
LOST = "the lease on event {} was lost, and another worker may have it; this attempt commits nothing"


def has_written(transaction: DbTransaction) -> bool:
    return transaction.backend.has_written(transaction.connection)
