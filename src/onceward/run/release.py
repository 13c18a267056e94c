"""Give back at once what a dead worker held: deliveries of its sources, claims of its inbox, redriven dead letters,
slots of limits, probes.

The supervisor knows that its worker is dead, because it has waited for it; a frozen worker keeps everything. What was
held counts as lost, as if its lease had expired, so a message that kills its workers still becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onceward._sync import run_blocking
from onceward.app.app import Consumer, Onceward
from onceward.app.relay import all_consumers
from onceward.connectors.owners import can_release
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from sqlalchemy import Engine

_log = OwnLogger(logging.getLogger("onceward.run"))

AGAIN = (1.0, 3.0)
"""Pauses between rounds, in seconds: commands that a process sent before it died may arrive after the first round."""
RETRY = 1.0
PATIENCE = 60.0
"""Seconds to try again if a source or the database is unavailable. After that their leases expire anyway."""
FIRST_ROUND = 3.0
"""Seconds that the supervisor waits for the first round before it goes on without it."""
LAST_ROUND = 0.8
"""The same while it stops."""
CONNECT_SECONDS = 5

Holder = Callable[[str], int]
"""Takes an owner, ends its leases in one place, and returns how many it could not end yet."""
HolderOfName = tuple[str, Holder]
DATABASE = "the database"
"""Is asked first: a message that came back before its claim ended would have to wait again."""


class Releases:
    """The rounds run in threads of their own: a source that does not answer must not hold up the supervisor."""

    def __init__(self, app: Onceward, only: Sequence[str] = ()) -> None:
        self._holders: list[HolderOfName] = []
        if app.settings.database is not None:
            self._holders.append((DATABASE, lambda owner: _release_in_database(app, owner)))
        for consumer in all_consumers(app, only):
            self._holders.append((consumer.name, _holder_of(consumer)))

    async def __call__(self, worker: str, owner: str, stopping: asyncio.Event) -> None:
        """Return after the first round, or without it after `FIRST_ROUND` seconds, or `LAST_ROUND` after a stop."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def on_first_round() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(
            target=self._rounds, args=(worker, owner, on_first_round), daemon=True, name="onceward-release"
        ).start()
        over, stopped = (asyncio.ensure_future(each.wait()) for each in (ended, stopping))
        await asyncio.wait({over, stopped}, timeout=FIRST_ROUND, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            await asyncio.wait({over}, timeout=LAST_ROUND)
        for each in (over, stopped):
            each.cancel()

    def _rounds(self, worker: str, owner: str, on_first_round: Callable[[], None]) -> None:
        deadline = time.monotonic() + PATIENCE
        waiting = self._round(worker, owner, self._holders, None)
        on_first_round()
        for pause in AGAIN:
            time.sleep(pause)
            waiting = self._round(worker, owner, self._holders, None)
        while waiting and time.monotonic() < deadline:
            time.sleep(RETRY)
            waiting = self._round(worker, owner, waiting, deadline)

    def _round(
        self, worker: str, owner: str, holders: list[HolderOfName], deadline: float | None
    ) -> list[HolderOfName]:
        """Return the holders that need another round."""
        waiting: list[HolderOfName] = []

        def ask(each: HolderOfName) -> None:
            name, release = each
            try:
                left = release(owner)
            except Exception as error:  # noqa: BLE001  whatever it is, the lease is still there
                left = 1
                if deadline is not None and time.monotonic() + RETRY >= deadline:
                    _log.warning(
                        "cannot give back what %s held in %s; it comes back when its lease expires: %s",
                        worker, name, error,
                    )  # fmt: skip
            if left:
                waiting.append(each)

        first = [each for each in holders if each[0] == DATABASE]
        for group in (first, [each for each in holders if each not in first]):
            # At the same time: a source that does not answer must not hold up the others.
            threads = [threading.Thread(target=ask, args=(each,), daemon=True) for each in group]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return waiting


def _holder_of(consumer: Consumer) -> Holder:
    async def release(owner: str) -> int:
        asynchronous = consumer.asynchronous
        connector: Any = consumer.source.open(asynchronous=asynchronous)
        try:
            if can_release(connector):
                if asynchronous:
                    await connector.release_owner_async(owner)
                else:
                    connector.release_owner(owner)
        finally:
            await connector.close_async() if asynchronous else connector.close()
        return 0

    return lambda owner: (asyncio.run if consumer.asynchronous else run_blocking)(release(owner))


def _release_in_database(app: Onceward, owner: str) -> int:
    import sqlalchemy

    from onceward.app.build import database_url
    from onceward.app.engines import database_timeouts
    from onceward.db.engines import connect_arguments, hide_values

    assert app.settings.database is not None
    url = database_url(app.settings.database, asynchronous=False)
    arguments = connect_arguments(url, database_timeouts(app)._replace(connect=CONNECT_SECONDS))
    engine = hide_values(sqlalchemy.create_engine(url, connect_args=arguments))
    try:
        return run_blocking(_release_rows(engine, owner))
    finally:
        engine.dispose()


async def _release_rows(engine: Engine, owner: str) -> int:
    from onceward.deadletters import redrive_leases
    from onceward.errors import ConfigurationError
    from onceward.failures.records import free_probes
    from onceward.inbox.stores import owners, store_of
    from onceward.limits.records import free_owner
    from onceward.storage.database import BlockingStoragePorts, check_tables

    ports, store = BlockingStoragePorts(engine), store_of(engine.dialect)
    try:
        await ports.transact(check_tables, store)
    except ConfigurationError:
        return 0  # the worker died before it created the tables
    await ports.transact(free_owner, store, owner)
    await ports.transact(free_probes, store, owner)
    claims = await ports.transact(owners.release_owner, store, owner)
    return claims + await ports.transact(redrive_leases.release_owner, store, owner)
