"""Tells the servers of a store that a time is right, for operators. Works beside a running server."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import msgspec

from onceward._time import Moment
from onceward.boundary.stores import check_exists, directory_of, open_store, sqlite
from onceward.boundary.stores.directory import connect
from onceward.errors import ConfigurationError


async def trust_time(url: str, moment: Moment) -> None:
    """Store it in a directory (or sqlite:///directory), postgresql://… or nats://…."""
    check_exists(url)
    directory = directory_of(url)
    if directory is None:
        store = await open_store(url)
        try:
            await store.trust_time(moment)
        finally:
            await store.close()
        return
    path = directory / "boundary.db"
    try:
        with closing(connect(path)) as connection:
            connection.execute(sqlite.TRUST_TIME, (msgspec.json.encode(moment).decode(),))
    except sqlite3.Error as error:
        raise ConfigurationError(f"{path} cannot be written: {error}") from error
