"""Keep a run within the connections that its PostgreSQL accepts."""

from __future__ import annotations

import logging

from onceward.app.app import Onceward
from onceward.app.engines import LISTENING, connections_of_sources, most_connections
from onceward.errors import OncewardError
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.run"))

FOR_OTHERS = 5
"""Connections left for everything else: psql, `onceward` commands, what gives back the work of a dead worker."""


def pool_size_that_fits(app: Onceward) -> int | None:
    """Return a pool size per process if the default would open more connections than PostgreSQL accepts, else None."""
    accepted = _accepted(app)
    most, processes = most_connections(app), app.settings.processes
    if accepted is None or most + FOR_OTHERS <= accepted:
        return None
    if app.settings.pool_size is not None:
        _log.warning(
            "with pool_size %d, %d processes may open %d connections; PostgreSQL accepts %d",
            app.settings.pool_size, processes, most, accepted,
        )  # fmt: skip
        return None
    size = max((accepted - FOR_OTHERS) // processes - LISTENING - connections_of_sources(app), 1)
    _log.warning(
        "PostgreSQL accepts %d connections, and %d processes would open up to %d: each opens at most %d, and messages "
        "wait for one; set pool_size, run fewer processes, or raise max_connections",
        accepted, processes, most, size,
    )  # fmt: skip
    return size


def _accepted(app: Onceward) -> int | None:
    """How many connections the server accepts from all clients; None for SQLite, or if it does not answer."""
    from onceward.app.build import database_url
    from onceward.inspection.probes import accepted_connections, open_database

    database = app.settings.database
    if database is None or database_url(database, asynchronous=False).get_backend_name() == "sqlite":
        return None
    try:
        with open_database(database) as connection:
            return None if connection is None else accepted_connections(connection)
    except OncewardError:
        return None  # the workers wait for it, and say so
