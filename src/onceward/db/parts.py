"""Parts of a transaction: each is a session of its own that can be undone alone, and they commit together.

The first part has no savepoint: undoing it undoes the transaction, in which there is nothing else yet. A part that
cannot be undone alone makes the whole LOST: it can only be rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

from onceward._process.forks import forks
from onceward.db.errors import SessionError
from onceward.db.transaction import BlockingSessionPort, DbTransaction, SessionState
from onceward.task.cancellation import current_token, raise_if_cancelled
from onceward.task.exceptions import AttemptInterrupted

if TYPE_CHECKING:
    from sqlalchemy import Connection

_OPEN: Final = SessionState.OPEN  # looking up a member of an enum is slow


class PartTransaction(DbTransaction):
    """A part of `whole`, on its connection. `number` counts the parts from 0."""

    def __init__(self, whole: DbTransaction, number: int) -> None:
        # Not by super().__init__(), which would look at the engine again.
        self.backend, self._engine, self._name = whole.backend, whole._engine, whole._name
        self._generation = forks.generation
        self._whole = whole
        self._number = number

    def open(self) -> None:
        """Begin, without a call to the database: the savepoint comes with the first use of the connection."""
        whole = self._whole
        self._connection = whole.usable
        self._runner = whole.runner
        if self._number:
            self.has_begun = False
        else:
            self.has_begun = True
            whole.parts += 1
        self._state = _OPEN

    @property
    def connection(self) -> Connection:
        connection = self.usable
        if not self.has_begun:
            self.take_words()
            self.backend.begin_part(connection, self._number)
        return connection

    def take_words(self) -> Sequence[str]:
        if self.has_begun:
            return ()
        self.has_begun = True
        self._whole.parts += 1
        return self.backend.part_words(self._number)

    def return_words(self, words: Sequence[str]) -> None:
        if words:
            self.has_begun = False
            self._whole.parts -= 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End this part: keep it for the commit of the whole, or undo it because of the error."""
        connection = self._leaving()
        if self.is_of_parent:
            self._leave_to_parent(error)
            return
        lost, self._state = self._state is SessionState.LOST, SessionState.ENDED
        self._forget_canceller()
        problem = self._problem(connection, lost) if error is None else error
        self._failure, cause = None, self._failure
        try:
            if problem is None:
                if self._loan is not None:
                    self._loan.end()
                _end_nested(connection)
                self.backend.end_part(self.runner)
            elif lost or not self._number:
                self._whole.lose(problem)
            elif self.has_begun:
                self.backend.undo_part(connection, self._number)
        except BaseException as failure:
            self._whole.lose(failure)
            if problem is None or not isinstance(failure, Exception):
                raise
            problem.add_note("It could not be undone alone, so nothing of its transaction is committed.")
        finally:
            self._pass_on(kept=problem is None)
        if self._was_canceled and self.backend.cancels_late:
            self._whole.lose(problem or SessionError("a statement was canceled, and the next may be too"))
            self._whole._was_canceled = True
        if error is None and problem is not None:
            raise problem from cause

    def end_at_once(self, error: BaseException | None) -> bool:
        """Keep it for the commit of the whole, if that needs neither a call to the database nor a decision. Returns
        whether it has ended; if not, `__exit__` ends it."""
        if error is not None or self._state is not _OPEN or self._generation != forks.generation:
            return False
        if self._loan is not None:
            return False
        if self._canceller is not None:
            self._forget_canceller()
        connection, token = self._connection, self.token
        if (
            self._failure is not None
            or connection is None
            or connection._nested_transaction is not None
            or (token is not None and token.expired)
        ):
            return False
        try:
            self.backend.end_part(self._runner)
        except SessionError:
            return False
        self._state = SessionState.ENDED
        self._pass_on(kept=True)
        return True

    def _pass_on(self, *, kept: bool) -> None:
        """The whole decides on a part that is kept."""
        if kept:
            self._whole.at_end += self.at_end
        else:
            self.tell(False)

    def _problem(self, connection: Connection, lost: bool) -> BaseException | None:
        """Why this part must not be committed, if its code raised nothing."""
        if self.token is not None and self.token.expired:
            return AttemptInterrupted("this attempt ran out of time; its transaction was rolled back")
        if lost or (self._failure is not None and self.backend.will_not_commit(connection)):
            return SessionError(self._why_lost())
        return None


def _end_nested(connection: Connection) -> None:
    """Commit the nested transactions that user code has left open, as the commit of a transaction does."""
    while (nested := connection.get_nested_transaction()) is not None:
        nested.commit()


class BlockingPartPort(PartTransaction, BlockingSessionPort):
    """A part in threads."""

    def open_part(self) -> None:
        """Begin. A statement of this part is canceled if the attempt runs out of time."""
        token = current_token()
        if token is None:
            self.open()
            return
        if token.expired:
            raise_if_cancelled()
        self.token = token
        self.open()
        self._driver = self._whole.driver
        self._canceller = token.add(self.cancel)
