"""Many runs under load, each stopped at a random moment; then the rest is drained, and the books are compared."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from uuid import uuid4

from onceward.connectors.urls import Address
from onceward.run.protocol import Assignment
from onceward.run.supervisor import Supervisor
from onceward.transaction import Transaction
from tests.support.wait import until_async

LANES = 2
"""Runs at the same time."""
SECONDS = 0.002
"""Seconds that a message takes."""
LONGEST = 0.4
"""The most seconds that a run works before it is stopped."""
AHEAD = 60
"""The fewest messages in the queue, so there is always load."""


class Shutdowns:
    """Run in `directory`, which must be the working directory; with Redis if there is a URL, otherwise with SQLite."""

    def __init__(self, directory: Path, redis_url: str | None) -> None:
        shutil.copy(Path(__file__).with_name("site_.py"), directory / "site_.py")
        self._directory = directory
        self._count = 0
        place = redis_url or f"sqlite:///{directory}"
        ending = f"{uuid4().hex}?lease=60"
        self.sources = [f"{place}/charges-{ending}", f"{place}/mails-{ending}"]
        self.codes: list[int] = []
        with closing(sqlite3.connect(directory / "site.db")) as database, database:
            database.execute("CREATE TABLE effects (consumer TEXT, number INTEGER)")

    def run(self, rounds: int) -> None:
        self._send(2 * AHEAD)
        asyncio.run(self._rounds(rounds))
        asyncio.run(self._drain())

    async def _rounds(self, rounds: int) -> None:
        left = iter(range(rounds))

        async def lane() -> None:
            for _ in left:
                self.codes.append(await self._one())

        await asyncio.gather(*(lane() for _ in range(LANES)))

    async def _one(self) -> int:
        """One run, from its start to its end."""
        if len(self.effects()) > len(self.sent()) - 2 * AHEAD:
            self._send(AHEAD)
        supervisor = Supervisor(_assignment(drain=False), processes=1)
        running = asyncio.ensure_future(supervisor.run())
        if random.random() < 0.9:  # the others are stopped while they start
            await until_async(lambda: _works(supervisor))
        await asyncio.sleep(random.uniform(0, LONGEST))
        supervisor.on_signal(signal.SIGTERM)
        return await running

    async def _drain(self) -> None:
        self.codes.append(await Supervisor(_assignment(drain=True), processes=2).run())

    def _send(self, count: int) -> None:
        for source in self.sources:
            connector = Address(source).open(asynchronous=False)
            try:
                connector.dispatch_transactions(
                    [
                        Transaction(payload={"number": number, "seconds": SECONDS})
                        for number in range(self._count, self._count + count)
                    ]
                )
            finally:
                connector.close()
        self._count += count

    # ── the books ───────────────────────────────────────────────────────────────────────────────────────

    def sent(self) -> list[str]:
        return sorted(
            f"{consumer}-{number}" for consumer in ("charge", "mail") for number in range(self._count)
        )

    def effects(self) -> list[str]:
        with closing(sqlite3.connect(self._directory / "site.db")) as database:
            return sorted(
                f"{row[0]}-{row[1]}" for row in database.execute("SELECT consumer, number FROM effects")
            )

    def calls(self) -> list[str]:
        return sorted((self._directory / "calls.txt").read_text().split())


def _assignment(*, drain: bool) -> Assignment:
    return Assignment(
        target="site_:app",
        number=0,
        drain=drain,
        grace=60.0,
        log_format="console",
        log_level="warning",
        env=None,
        concurrency=None,
    )


def _works(supervisor: Supervisor) -> bool:
    """Whether its worker has something in flight."""
    process = supervisor.places[0].process
    consumers = [] if process is None or process.status is None else process.status.consumers
    return any(consumer.in_flight for consumer in consumers)
