"""A second `Connection` on the driver's connection of a session. It has no end of its own: the session ends both."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from sqlalchemy import Connection, NestedTransaction, event

if TYPE_CHECKING:
    from onceward.db.guests.guest import Guest

AT_RETURN = (
    "the inbox commits when the handler returns, together with the record that the event is done; "
    "remove this line"
)
RAISE = "raise an exception to undo the event, or use begin_nested() for a part that may fail"


class LentConnection(Connection):
    """Has a root transaction of its own, in which nothing happens: a Session puts a savepoint into it."""

    def __init__(self, real: Connection, guest: Guest) -> None:
        super().__init__(real.engine, connection=real.connection)
        self.real = real
        self._guest = guest
        super().begin()
        event.listen(self, "before_cursor_execute", self._check)
        event.listen(self, "commit", self._refuse_commit)
        event.listen(self, "rollback", self._refuse_rollback)

    @property
    def connection(self) -> Any:
        """The connection of the pool. Code that asks for it can go past everything here."""
        self._guest.lend()
        return super().connection

    def execute(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> Any:
        run = partial(super().execute, statement, parameters, execution_options=execution_options)
        return self._run(statement, run)

    def exec_driver_sql(self, statement: str, parameters: Any = None, execution_options: Any = None) -> Any:
        run = partial(super().exec_driver_sql, statement, parameters, execution_options)
        return self._run(statement, run)

    def _run(self, statement: Any, run: Any) -> Any:
        result = self._guest.statement(statement, run)
        if result.cursor is not None:
            self._guest.reads.add(result.cursor)
        return result

    def scalar(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> Any:
        return self.execute(statement, parameters, execution_options=execution_options).scalar()

    def scalars(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> Any:
        return self.execute(statement, parameters, execution_options=execution_options).scalars()

    def begin_nested(self) -> NestedTransaction:
        return LentSavepoint(self, self._guest)

    def commit(self) -> None:
        self._refuse_commit()

    def rollback(self) -> None:
        self._refuse_rollback()

    def close(self) -> None:
        self._guest.refuse("close() of the connection", "it is the inbox's, which closes it; remove the call")

    def begin(self) -> Any:
        self._guest.refuse("begin() of the connection", f"the transaction is open already; {AT_RETURN}")

    begin_twophase = begin  # type: ignore[assignment]

    def _check(self, _: Connection, cursor: Any, statement: str, *__: Any) -> None:
        self._guest.check_text(statement, self.dialect.name)

    def _refuse_commit(self, *_: Any) -> NoReturn:
        self._guest.refuse("commit() of the connection", AT_RETURN)

    def _refuse_rollback(self, *_: Any) -> NoReturn:
        self._guest.refuse("rollback() of the connection", RAISE)


class LentSavepoint(NestedTransaction):
    """A savepoint. Once the handler has ended, the inbox decides what becomes of it."""

    def __init__(self, connection: LentConnection, guest: Guest) -> None:
        super().__init__(connection)
        self._guest = guest

    def rollback(self) -> None:
        if self._guest.ended:
            self.is_active = False
            return
        super().rollback()
