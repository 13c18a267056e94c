"""What a session does with its transaction: run SQL, insert or update a row safely, take locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from math import isfinite
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import (
    ClauseElement,
    ColumnElement,
    Connection,
    CursorResult,
    Engine,
    Executable,
    Table,
    TableClause,
    TextClause,
    and_,
    bindparam,
    column,
    insert,
    literal,
    literal_column,
    select,
    table,
    text,
    update,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError, IntegrityError

from onceward._process.forks import forks
from onceward.db.calls import CALLS
from onceward.db.errors import (
    ENDED_WITHIN,
    LockTimeoutError,
    OptimisticConflict,
    RetryRefusedError,
    RowError,
    SessionError,
)
from onceward.db.statement import check, guard, is_guarded, refusal
from onceward.db.transaction import DbTransaction, SessionState
from onceward.errors import ConfigurationError

T = TypeVar("T")
Sql = str | Executable
"""SQL with `:name` parameters, or a SQLAlchemy construct."""
Params = Mapping[str, Any]
Row = dict[str, Any]
AnyTable = str | TableClause | type[Any]
"""A name, a `Table` or `sqlalchemy.table(…)`, or a mapped class."""

Prepared = tuple[Connection, Any, str, Any, Sequence[str]]
"""The arguments of `Backend.direct`."""

_OPEN: Final = SessionState.OPEN
DEFAULT_TIMEOUT: Final = 10.0
"""Seconds to wait for a lock."""


class OneStatement(Generic[T]):
    """An operation that is one text. The driver runs it without SQLAlchemy, and in asyncio without a greenlet, unless
    somebody watches the statements of the engine."""

    def __init__(
        self,
        given: Callable[..., tuple[str, Params] | None],
        result: Callable[[tuple[int, Any]], T],
        otherwise: Callable[..., T],
    ) -> None:
        """`given(…)` returns the text and its values, from the arguments of the operation, and `result((rows, first))`
        what it returns. None: the driver cannot run it, and `otherwise` does."""
        self._given = given
        self.result = result
        self._otherwise = otherwise

    def __call__(self, transaction: DbTransaction, *args: Any) -> T:
        given = self._given(*args)
        call = None if given is None else _prepare(transaction, *given)
        if call is not None:
            found = transaction.backend.direct(*call)
            if found is not None:
                return self.result(found)
            transaction.return_words(call[-1])
        return self._otherwise(transaction, *args)

    def prepare(self, transaction: DbTransaction, *args: Any) -> Prepared | None:
        """What the backend gets to run it. None if SQLAlchemy has to."""
        given = self._given(*args)
        return None if given is None else _prepare(transaction, *given)


def _direct(transaction: DbTransaction, sql: str, params: Params) -> tuple[int, Any] | None:
    """Run a text on the driver, with what has to come before it. Returns the rows affected and the first row; None if
    nothing was run."""
    call = _prepare(transaction, sql, params)
    if call is None:
        return None
    found = transaction.backend.direct(*call)
    if found is None:
        transaction.return_words(call[-1])
    return found


def _prepare(transaction: DbTransaction, sql: str, params: Params) -> Prepared | None:
    """What the backend gets to run a text on the driver. None if SQLAlchemy has to run it."""
    if transaction._generation != forks.generation or transaction._state is not _OPEN:
        transaction.check_usable()  # as `usable`, which is asked for every statement
    connection: Any = transaction._connection
    if connection._echo or (
        (connection._has_events or connection.engine._has_events) and _is_heard(connection)
    ):
        return None
    driver_sql, names, values_of, why = _compiled(sql, connection.dialect)
    if why is not None:
        raise SessionError(why)
    try:
        values = values_of(params)
    except KeyError:
        return None  # it says what is missing
    given = values if names is None else dict(zip(names, values, strict=True))
    words = () if transaction.has_begun else transaction.take_words()
    return connection, transaction._runner or transaction.runner, driver_sql, given, words


def execute_by_sqlalchemy(
    transaction: DbTransaction, sql: Sql, params: Params | Sequence[Params] | None
) -> int:
    if params is not None and not params and not isinstance(params, Mapping):
        return 0  # an empty list; SQLAlchemy would run the statement once, without parameters
    with _result(transaction, sql, params) as result:
        return int(result.rowcount)


def _given(sql: Sql, params: Params | Sequence[Params] | None) -> tuple[str, Params] | None:
    words = sql if type(sql) is str else _words(sql)
    fits = type(params) is dict or isinstance(params, Mapping | None)  # asking an abstract class takes long
    return (words, params or {}) if words is not None and fits else None  # type: ignore[return-value]


_rows_affected: Callable[[tuple[int, Any]], int] = itemgetter(0)
execute: Final = OneStatement(_given, _rows_affected, execute_by_sqlalchemy)


def execute_scalar(transaction: DbTransaction, sql: Sql, params: Params | None) -> Any:
    with _result(transaction, sql, params) as result:
        return result.scalar()


def fetch_one(transaction: DbTransaction, sql: Sql, params: Params | None) -> Row | None:
    with _result(transaction, sql, params) as result:
        rows = _rows(result, at_most=2)
    if len(rows) > 1:
        raise RowError("the query returned more than one row; narrow it down, or use fetch_all")
    return rows[0] if rows else None


def fetch_all(transaction: DbTransaction, sql: Sql, params: Params | None) -> list[Row]:
    with _result(transaction, sql, params) as result:
        return _rows(result)


def statement(transaction: DbTransaction, sql: Any, call: Callable[[], T]) -> T:
    """Run a statement that a library makes: an ORM, or a driver."""
    driver: Any = transaction.connection.dialect.loaded_dbapi
    try:
        return call()
    except driver.Error as error:
        transaction.fail(error)
        raise


def check_open(transaction: DbTransaction) -> None:
    """Raise if the database has ended the transaction, or other code has."""
    if transaction.backend.is_idle(transaction.connection):
        error = SessionError(ENDED_WITHIN)
        transaction.lose(error)
        raise error


def insert_idempotent(
    transaction: DbTransaction, table: AnyTable, values: Mapping[str, Any], key: Sequence[str] | None
) -> bool:
    target = table_of(table, values)
    key_values = _select_key(values, key)
    connection = transaction.connection
    try:
        with connection.begin_nested():  # on PostgreSQL an error would otherwise abort the whole transaction
            connection.execute(insert(target).values(dict(values))).close()
    except IntegrityError as error:
        if not transaction.backend.is_duplicate(error):
            raise
        if key_values and not _exists(connection, target, key_values):
            raise
        return False
    return True


def occ_update(
    transaction: DbTransaction,
    table: AnyTable,
    key: Mapping[str, Any],
    values: Mapping[str, Any],
    expected: int,
    version_column: str,
) -> int:
    if transaction.had_conflict:
        raise RetryRefusedError(
            "an optimistic update already conflicted in this session, and a retry would rely on stale reads; "
            "end this session, open a new session and read again"
        )
    if not key or version_column in key or version_column in values:
        raise ConfigurationError(
            f"occ_update needs the key of one row, and {version_column} in neither key nor values"
        )
    target = table_of(table, [*key, *values, version_column])
    found = transaction.connection.execute(
        update(target)
        .where(row_is(target, {**key, version_column: expected}))
        .values({**values, version_column: expected + 1})
    ).rowcount
    if found == 1:
        return expected + 1
    if found == 0:
        transaction.had_conflict = True
        raise OptimisticConflict(target.name, key, expected)
    error = RowError(f"{dict(key)} names {found} rows of {target.name}; pass the columns of a unique key")
    transaction.lose(error)  # all of them were changed
    raise error


def lock_row(
    transaction: DbTransaction, table: AnyTable, key: Mapping[str, Any], timeout: float
) -> Row | None:
    target = table_of(table, key)
    columns = list(target.c) if isinstance(target, Table) else [literal_column("*")]
    query = select(*columns).select_from(target).where(row_is(target, key)).with_for_update()
    with _waiting(transaction, timeout, f"{target.name} {dict(key)}"):
        return fetch_one(transaction, query, None)


def advisory_lock(transaction: DbTransaction, name: str | int, timeout: float) -> None:
    with _waiting(transaction, timeout, f"the advisory lock {name!r}"):
        transaction.backend.take_advisory_lock(transaction.connection, key_of(name))


def key_of(name: str | int) -> int:
    """Return the 64-bit key of a lock. If two names share a key, they only wait for each other."""
    if isinstance(name, str):
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
    if not -(2**63) <= name < 2**63:
        raise ConfigurationError(f"an advisory lock is a name or a number that fits 64 bits, not {name}")
    return name


def table_of(given: AnyTable, columns: Iterable[str]) -> TableClause:
    """Return the table with at least these columns, so SQLAlchemy quotes every name that needs it."""
    found = getattr(given, "__table__", given)
    if isinstance(found, str):
        found = table(found)
    if not isinstance(found, TableClause):
        raise ConfigurationError(f"a table is a name, a Table or a mapped class, not {given!r}")
    missing = [name for name in columns if name not in found.c]
    if not missing:
        return found
    if isinstance(found, Table):
        raise ConfigurationError(f"table {found.name} has no column {', '.join(missing)}")
    return table(
        found.name, *(column(c.name, c.type) for c in found.c), *map(column, missing), schema=found.schema
    )


def row_is(target: TableClause, key: Mapping[str, Any]) -> ColumnElement[bool]:
    """Return the condition that selects one row."""
    if not key:
        raise ConfigurationError(f"no key columns were given; they select the row of {target.name}")
    prefix = "key"
    while any(column.key.startswith(prefix) for column in target.c):
        prefix += "_"
    return and_(*(_equals(target.c[name], key[name], f"{prefix}{n}") for n, name in enumerate(key)))


def run_first(transaction: DbTransaction, sql: str, params: Params) -> tuple[int, Any]:
    """Run a text of our own, in one call with what has to come before it in its transaction, if that is possible.
    Returns the rows affected and the first row."""
    found = _direct(transaction, sql, params)
    return run_by_sqlalchemy(transaction, sql, params) if found is None else found


def run_by_sqlalchemy(transaction: DbTransaction, sql: str, params: Params) -> tuple[int, Any]:
    options = {"preserve_rowcount": True}
    with transaction.connection.execute(_text(sql), params, execution_options=options) as result:
        return int(result.rowcount), result.first() if result.returns_rows else None


def _is_heard(connection: Connection) -> bool:
    engine = connection.engine
    return is_heard(
        engine, connection if connection._has_events else engine, guards=int(is_guarded(connection))
    )


def is_heard(engine: Engine, sender: Connection | Engine, guards: int = 0) -> bool:
    """Whether code of others listens to what SQLAlchemy sends to the driver, apart from our guards."""
    heard: Any = sender.dispatch
    ours = CALLS.watches(engine)
    return bool(
        len(heard.before_cursor_execute) > ours + guards
        or len(heard.after_cursor_execute) > ours
        or heard.before_execute
        or heard.after_execute
    )


@lru_cache(500)
def _compiled(
    sql: str, dialect: Dialect
) -> tuple[str, list[str] | None, Callable[[Params], tuple[Any, ...]], str | None]:
    """The text for the driver, the names of its parameters if it takes their values by name, what picks the values, and
    why it must not be run, if so."""
    compiled: Any = _text(sql).compile(dialect=dialect)
    names = list(compiled.positiontup or compiled.params)
    # With one name, `itemgetter` would return a value instead of a tuple, and it needs one at least.
    pick: Any = itemgetter(*names) if len(names) > 1 else lambda params: tuple(map(params.__getitem__, names))
    return compiled.string, None if compiled.positional else names, pick, refusal(sql, dialect.name)


def _result(
    transaction: DbTransaction, sql: Sql, params: Params | Sequence[Params] | None
) -> CursorResult[Any]:
    statement = _text(sql) if isinstance(sql, str) else sql
    connection = transaction.connection
    if isinstance(statement, TextClause):
        check(connection, statement.text)
    else:
        guard(connection)  # a construct may contain any text
    return connection.execute(statement, params, execution_options={"preserve_rowcount": True})


@lru_cache(500)
def _text(sql: str) -> TextClause:
    return text(sql)


def _words(sql: Sql) -> str | None:
    """A text, or one in `text(…)` that has neither values nor types nor options. None for everything else."""
    if isinstance(sql, str):
        return sql
    if type(sql) is not TextClause or sql.get_execution_options():
        return None
    return sql.text if all(each.required and each.type._isnull for each in sql._bindparams.values()) else None


def _rows(result: CursorResult[Any], at_most: int | None = None) -> list[Row]:
    names = list(result.keys())
    if len(set(names)) < len(names):
        raise RowError(f"two columns have the same name in {', '.join(names)}; give one an alias with AS")
    rows = result.fetchall() if at_most is None else result.fetchmany(at_most)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _exists(connection: Connection, target: TableClause, key: Mapping[str, Any]) -> bool:
    # SQLite names the violated constraint only in its message, so look for the row.
    if any(value is None for value in key.values()):
        return False  # to a constraint, NULL differs from every other NULL
    found = connection.execute(select(literal(1)).select_from(target).where(row_is(target, key)).limit(1))
    return found.first() is not None


def _select_key(values: Mapping[str, Any], key: Sequence[str] | None) -> dict[str, Any]:
    if key is None:
        return {}
    names = [key] if isinstance(key, str) else list(key)
    missing = [name for name in names if name not in values]
    if missing or not names:
        raise ConfigurationError(
            f"key columns must be columns of the row; {missing or 'none'} is not among {list(values)}"
        )
    return {name: values[name] for name in names}


@contextmanager
def _waiting(transaction: DbTransaction, timeout: float, what: str) -> Iterator[None]:
    if not (isfinite(timeout) and timeout >= 0):
        raise ConfigurationError(f"timeout must be a number of seconds, 0 or more, not {timeout!r}")
    try:
        with transaction.backend.lock_timeout(transaction.connection, timeout):
            yield
    except DBAPIError as error:
        if not transaction.backend.is_lock_timeout(error):
            raise
        raise LockTimeoutError(
            f"{what} was locked by another session for longer than {timeout:g} s"
        ) from error


def _equals(left: ColumnElement[Any], right: Any, parameter: str) -> ColumnElement[bool]:
    # SQLAlchemy would name the parameter `id_1`, which in an UPDATE is the value for a column `id_1`.
    if right is None or isinstance(right, ClauseElement):
        return left == right
    return left == bindparam(parameter, right, left.type)
