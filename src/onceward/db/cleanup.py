"""Leaving a connection clean without hiding the error that made it necessary."""

from __future__ import annotations

import logging

from sqlalchemy import Connection

_log = logging.getLogger(__name__)


def roll_back(connection: Connection, cause: BaseException, *, after_commit: bool = False) -> None:
    """Roll back because of `cause`, which stays the error that is seen.

    `after_commit`: a commit has failed. SQLAlchemy then regards the transaction as over, the database need not.
    """
    try:
        connection.rollback()
        if after_commit and not connection.invalidated:
            connection.connection.rollback()
    except BaseException as failure:
        _throw_away(connection)
        if not isinstance(failure, Exception):
            raise
        cause.add_note(f"The rollback failed, too, and the connection was thrown away: {failure}")
        _log.warning("a rollback failed; throwing the connection away ends its transaction", exc_info=True)


def give_back(connection: Connection) -> None:
    """To its pool. The transaction has ended by now, and its outcome says more than a failure here."""
    try:
        connection.close()
    except Exception:  # noqa: BLE001
        _log.warning("a connection could not be given back to its pool", exc_info=True)


def _throw_away(connection: Connection) -> None:
    try:
        connection.invalidate()
    except Exception:  # noqa: BLE001
        _log.warning("a broken connection could not be closed", exc_info=True)
