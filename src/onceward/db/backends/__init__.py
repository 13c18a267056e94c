"""What differs between databases, one file each. `base.py` says what a file has to offer."""

from __future__ import annotations

from sqlalchemy.engine import Dialect

from onceward.db.backends.base import Backend
from onceward.db.backends.postgresql import PostgreSql
from onceward.db.backends.sqlite import Sqlite
from onceward.errors import ConfigurationError

_BACKENDS: dict[str, type[Backend]] = {"sqlite": Sqlite, "postgresql": PostgreSql}


def backend_of(dialect: Dialect) -> Backend:
    backend = _BACKENDS.get(dialect.name)
    if backend is None:
        raise ConfigurationError(
            f"a session works on {' and '.join(_BACKENDS)}, not on {dialect.name!r}; "
            "give it an engine of one of these"
        )
    return backend()
