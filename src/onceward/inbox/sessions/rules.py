"""What both kinds of session refuse."""

from __future__ import annotations

from onceward.db.transaction import DbTransaction

NOT_EFFECTFUL = (
    "the contract of this consumer says mode='transactional': its handler runs inside a database transaction, and an "
    "outside call cannot be part of that; say mode='effectful' to have effects written down before they are called"
)
NOT_DECIDED = (
    "no effect before the inbox has decided that the event is new: effects belong into the running handler"
)
WRITTEN = (
    "effects come before writes: this session has uncommitted changes, and would hold them, and the database's locks, "
    "during an outside call. Call the effects first, then write"
)
LOST = "the lease on event {} was lost, and somebody else may have it; nothing of this attempt is committed"


def has_written(transaction: DbTransaction) -> bool:
    return transaction.backend.has_written(transaction.connection)
