"""A question that is asked again and again, of the driver itself: SQLAlchemy takes longer than the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, text

from onceward.db.calls import CALLS
from onceward.db.operations import is_heard


class Glance:
    """Whether a query finds a row."""

    def __init__(self, engine: Engine, sql: str, values: dict[str, Any]) -> None:
        compiled: Any = text(sql).bindparams(**values).compile(dialect=engine.dialect)
        self._engine = engine
        self._sql = str(compiled)
        names, given = compiled.positiontup, compiled.params
        self._values = given if names is None else tuple(given[name] for name in names)

    def finds(self) -> bool | None:
        """None if SQLAlchemy has to ask: somebody watches its statements, or the driver failed, and it says why."""
        if self._engine.echo or is_heard(self._engine, self._engine):
            return None
        lent = self._engine.raw_connection()
        try:
            with CALLS.call_on(lent.dbapi_connection):
                return self._ask(lent.dbapi_connection)
        except self._engine.dialect.loaded_dbapi.Error as error:
            lent.invalidate(error)
            return None
        except BaseException:
            lent.invalidate()  # it may still be in autocommit
            raise
        finally:
            lent.close()

    def _ask(self, driver: Any) -> bool:
        dialect = self._engine.dialect
        begins = dialect.name != "sqlite"  # which begins no transaction before a query
        if begins:
            dialect.set_isolation_level(driver, "AUTOCOMMIT")
        cursor = driver.cursor()
        cursor.execute(self._sql, self._values)
        found = cursor.fetchone() is not None
        cursor.close()
        if begins:
            dialect.reset_isolation_level(driver)
        return found
