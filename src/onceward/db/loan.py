"""The connection of a transaction, lent to code of others by `session.run(function)`.

That code may do anything with it, so what would end the transaction is refused where SQLAlchemy shows it: statements
and `commit()`. What goes past SQLAlchemy, to the driver, is noticed: after the function, before every other operation
of the session, and before the commit, which then fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from sqlalchemy import event

from onceward.db.errors import ENDED_WITHIN, SessionError
from onceward.db.statement import ENDS_ITSELF, guard

if TYPE_CHECKING:
    from onceward.db.transaction import DbTransaction

OURS: Final = "onceward."
"""The modules whose operations do not end the transaction."""


class Loan:
    def __init__(self, transaction: DbTransaction) -> None:
        self._transaction = transaction
        self._connection = transaction.connection
        self._root = self._connection.get_transaction()
        self._mark: Any = None
        guard(self._connection)
        event.listen(self._connection, "commit", self._refuse_commit)

    def begin(self) -> None:
        """Code of others is about to get the connection."""
        if self._mark is None:
            self._mark = self._transaction.backend.lend(self._connection)

    def check(self) -> None:
        """Raise if SQLAlchemy has another transaction, or the driver none."""
        lost = self._connection.get_transaction() is not self._root
        if lost or (self._mark is not None and self._transaction.backend.is_idle(self._connection)):
            self._lose(ENDED_WITHIN)

    def end(self) -> None:
        """Raise unless the transaction can be committed, and is the one that was lent."""
        self.check()
        if self._mark is not None:
            self._transaction.backend.check_lent(self._connection, self._mark)

    def _refuse_commit(self, _: Any) -> None:
        if not self._transaction.has_ended:
            self._lose(ENDS_ITSELF)  # SQLAlchemy's transaction has ended now, and only a rollback is possible

    def _lose(self, why: str) -> NoReturn:
        error = SessionError(why)
        self._transaction.lose(error)
        raise error
