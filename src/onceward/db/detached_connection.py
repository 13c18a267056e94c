"""A connection to PostgreSQL that no pool has, in autocommit. It is closed only in its own process."""

from __future__ import annotations

import os
from typing import Any

from sqlalchemy import Engine


class DetachedConnection:
    """The connection, if there is one."""

    def __init__(self) -> None:
        self.driver: Any = None
        self._pid = 0

    def open(self, engine: Engine) -> Any:
        """Open it, and return it."""
        self.driver, self._pid = open_detached(engine), os.getpid()
        return self.driver

    def close(self) -> None:
        driver, self.driver = self.driver, None
        if driver is None:
            return
        if self._pid != os.getpid():
            _cut(driver)
        driver.close()

    def leave_to_parent(self) -> None:
        """After a fork, the connection is the parent's."""
        if self._pid != os.getpid():
            self.close()


def open_detached(engine: Engine) -> Any:
    """Return a connection of the driver that is not given back to the pool."""
    lent = engine.raw_connection()
    driver: Any = lent.driver_connection
    lent.detach()
    try:
        driver.rollback()
        driver.autocommit = True
    except BaseException:
        driver.close()
        raise
    return driver


def _cut(driver: Any) -> None:
    """Let nothing that is written on it reach the server: closing it would end the parent's session."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nowhere, driver.fileno())
    finally:
        os.close(nowhere)
