"""Real consumer processes of a boundary, which are really killed.

Run as `python consumer_process.py <mode> <strategy> <boundary's url> <directory>`. Each point gets a process, forked so
imports happen only once. It consumes as `consumer-<number>` into `<number>.db` and kills itself with SIGKILL, at the
fatal fact or at the confirm of that fact's batch. A line of output says how each ended. The product knows nothing of
these points: the processes patch their own copy of the code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.boundary import (
    AsyncBoundaryClient,
    AsyncBoundaryConsumer,
    BoundaryClient,
    BoundaryConsumer,
    StoredFact,
)
from onceward.boundary.strategies import LatestPerKey, OncePerId
from onceward.db import AsyncDbSession, DbSession
from onceward.db import handlers as consuming

LIMIT = 3
FATAL = 5
"""An offset: the second of the second batch."""
POINTS = {
    "before it is marked": (4, 3),
    "before apply": (4, 3),
    "after apply": (4, 3),
    "after persist": (5, 3),
    "before confirm": (6, 3),
    "after confirm": (6, 6),
}
"""The last durable outcome, and the position of the cursor."""
STRATEGIES: dict[str, Callable[[str], Any]] = {
    "once per id": OncePerId,
    "latest per key": lambda name: LatestPerKey(name, key=lambda fact: fact.fact.subject),
}
INSERT = "INSERT INTO effects (at_offset) VALUES (:at)"


class Doomed:
    def __init__(self, point: str) -> None:
        self._point = point

    def pass_by(self, point: str, offset: int) -> None:
        if point == self._point and offset == FATAL:
            os.kill(os.getpid(), signal.SIGKILL)


def arm(consumer: Any, doomed: Doomed) -> None:
    """Kill the process around the confirm, which comes with the fetch of the next batch, or alone."""
    for name in ("_fetch", "_confirm"):
        setattr(consumer, name, _armed(getattr(consumer, name), doomed))


def _armed(real: Any, doomed: Doomed) -> Any:
    async def confirm(offset: int) -> Any:
        doomed.pass_by("before confirm", offset - 1)  # the fatal fact is the last but one of its batch
        answer = await real(offset)
        doomed.pass_by("after confirm", offset - 1)
        return answer

    return confirm


def arm_persisting(doomed: Doomed, name: str) -> None:
    """Kill the process after the commit of a fact."""
    real = getattr(consuming, name)

    def attempts(handler: Any, engine: Any) -> Any:
        attempt = real(handler, engine)

        async def armed(fact: StoredFact) -> BaseException | None:
            error: BaseException | None = await attempt(fact)
            doomed.pass_by("after persist", fact.offset)
            return error

        return armed

    setattr(consuming, name, attempts)


def consume(doomed: Doomed, strategy: str, url: str, name: str, database: str) -> None:
    once = STRATEGIES[strategy](name)

    @once
    def book(fact: StoredFact, session: DbSession) -> None:
        doomed.pass_by("before apply", fact.offset)
        session.execute(INSERT, {"at": fact.offset})
        doomed.pass_by("after apply", fact.offset)

    def handle(fact: StoredFact, session: DbSession) -> None:
        doomed.pass_by("before it is marked", fact.offset)
        book(fact, session)

    engine = create_engine(f"sqlite:///{database}")
    try:
        with BoundaryClient(url) as client:
            with DbSession(engine) as session:
                once.create_table(session)
            consumer = BoundaryConsumer(client, name, LIMIT)
            arm(consumer, doomed)
            consumer.run(handle, engine, drain=True)
    finally:
        engine.dispose()


async def consume_async(doomed: Doomed, strategy: str, url: str, name: str, database: str) -> None:
    once = STRATEGIES[strategy](name)

    @once
    async def book(fact: StoredFact, session: AsyncDbSession) -> None:
        doomed.pass_by("before apply", fact.offset)
        await session.execute(INSERT, {"at": fact.offset})
        doomed.pass_by("after apply", fact.offset)

    async def handle(fact: StoredFact, session: AsyncDbSession) -> None:
        doomed.pass_by("before it is marked", fact.offset)
        await book(fact, session)

    engine = create_async_engine(f"sqlite+aiosqlite:///{database}")
    try:
        async with AsyncBoundaryClient(url) as client:
            async with AsyncDbSession(engine) as session:
                await once.create_table(session)
            consumer = AsyncBoundaryConsumer(client, name, LIMIT)
            arm(consumer, doomed)
            await consumer.run(handle, engine, drain=True)
    finally:
        await engine.dispose()


def forked(mode: str, point: str, *where: str) -> int:
    """Fork a process that consumes until it dies; returns its id."""
    child = os.fork()
    if child:
        return child
    doomed = Doomed(point)
    arm_persisting(doomed, "async_attempts" if mode == "asyncio" else "attempts")
    try:
        run(mode, doomed, *where)
    finally:
        os._exit(0)


def run(mode: str, doomed: Doomed, *where: str) -> None:
    if mode == "asyncio":
        asyncio.run(consume_async(doomed, *where))
    else:
        consume(doomed, *where)


if __name__ == "__main__":
    mode, strategy, url, directory = sys.argv[1:]
    children = [
        forked(mode, point, strategy, url, f"consumer-{number}", f"{directory}/{number}.db")
        for number, point in enumerate(POINTS)
    ]
    for child in children:
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
