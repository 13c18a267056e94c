"""A purge in another process, which dies at a named place.

Run as `python purger.py <place> <url> <options>`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from sqlalchemy import create_engine

from onceward.inbox import Inbox, PurgeReport
from onceward.inbox.purge import steps
from onceward.inbox.stores import partitions
from onceward.inbox.stores.sqlite import SqliteStore


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_midst(report: PurgeReport) -> None:
    if report.rows > 0:
        die()


def main(place: str, url: str, options: str) -> None:
    progress: Any = lambda report: None  # noqa: E731
    if place == "horizon":
        SqliteStore.days_below = die  # type: ignore[assignment,method-assign]
        partitions.await_old_snapshots = die
    elif place == "midst":
        steps.LARGEST_STEP = steps.FIRST_STEP = 50
        progress = die_in_the_midst
    elif place == "detached":
        partitions.drop = die  # type: ignore[assignment]
    elif place == "dropping":
        partitions.keep_held = _then_die(partitions.keep_held)
    elif place == "detaching":
        partitions.LOCK_WAIT = 600.0
    inbox = Inbox(create_engine(url, connect_args=json.loads(options)))
    inbox.purge(progress=progress)


def _then_die(keep_held: Any) -> Any:
    """The second copy is the one in the transaction that drops."""
    calls: list[int] = []

    def kept(*args: Any) -> int:
        calls.append(1)
        if len(calls) == 2:
            die()
        return int(keep_held(*args))

    return kept


if __name__ == "__main__":
    main(*sys.argv[1:])
