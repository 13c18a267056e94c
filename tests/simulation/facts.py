"""Zones that append facts to a boundary and others that apply them: the real store, rules, client calls and consumers.

What must hold: a fact that was acknowledged keeps its offset; offsets have no holes; a consumer applies every fact once
and in order, and nothing is confirmed that is not applied; a cursor never moves back.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from functools import cache
from pathlib import Path
from typing import Any

from onceward.boundary import AsyncBoundaryConsumer, envelope_for, fact_of
from onceward.boundary.errors import BoundaryError
from onceward.boundary.strategies import OncePerId
from tests.simulation.database import SimulatedDatabase
from tests.simulation.loop import Process
from tests.simulation.server import Server, client
from tests.simulation.simulation import Program, Simulation, template_folder

NAME = "receiver"


class FactWorld(Simulation):
    services = ("server", "database")

    def set_up(self, folder: Path) -> None:
        shutil.copy(self.prepared(template), folder / "business.db")
        self.server = Server(folder / "log", self.wire)
        self.database = SimulatedDatabase(folder / "business.db", self.wire, self._committed)
        self.view = sqlite3.connect(folder / "business.db", isolation_level=None)
        self.limit = self.random.choice((1, 2, 5))
        self.total = self.random.choice((2, 4, 8))
        self.known: dict[str, int] = {}
        """Acknowledged facts, with their offsets."""
        self.applied: list[int] = []
        self._cursor = 0

    def programs(self) -> dict[str, Program]:
        return {"server": self._serve, "anna": self._receive, "ben": self._receive}

    async def _serve(self, process: Process) -> None:
        await self.server.run(process)
        boundary = self.server.boundary
        assert boundary is not None
        before = boundary.store.advance

        async def advance(name: str, offset: int, at: int | None = None) -> int:
            position = await before(name, offset, at)
            self._confirmed(process, position)
            return position

        boundary.store.advance = advance  # type: ignore[method-assign]
        self._check_log(boundary.store)
        await asyncio.Event().wait()

    async def _receive(self, process: Process) -> None:
        once = OncePerId(NAME, clock=process.clock)
        engine = self.database.engine()

        @once
        async def apply(fact: Any, session: Any) -> None:
            self.history.note(process, "applies %d", fact.offset)
            await asyncio.sleep(self.random.choice((0.0, 0.0, 0.5)))
            row = {"offset": fact.offset, "id": fact.message_id}
            await session.execute("INSERT INTO applied VALUES (:offset, :id)", row)

        while True:
            consumer = AsyncBoundaryConsumer(
                client(self.server, process, self.wire), NAME, self.limit, empty_wait=1.0
            )
            try:
                await consumer.run(apply, engine)
            except Exception as error:
                self.history.note(process, "its run ends: %s: %.120s", type(error).__name__, error)
            await asyncio.sleep(self.random.choice((0.5, 2.0)))

    async def use(self) -> None:
        await asyncio.gather(*(self._produce(zone) for zone in ("x", "y")))

    async def _produce(self, zone: str) -> None:
        calls = client(self.server, self.root, self.wire)
        for number in range(self.total // 2 + (zone == "x")):
            id_ = f"{zone}{number}"
            envelope = envelope_for(id_, from_zone=zone, to_zone="plant", produced_at_unix_ms=1)
            fact = fact_of("tank:7", "level", {"n": number})
            for _ in range(self.random.choice((1, 1, 2))):  # a producer may repeat what it has sent
                while True:
                    try:
                        offset = (await calls.append(envelope, fact)).offset
                        break
                    except BoundaryError as error:
                        if not error.retryable:
                            raise
                        self.history.note(zone, "could not append %s: %.120s", id_, error)
                        await asyncio.sleep(0.7)
                self.history.note(zone, "has appended %s at %d", id_, offset)
                if self.known.setdefault(id_, offset) != offset:
                    self.accuse(f"{id_} was acknowledged at {self.known[id_]}, and again at {offset}")
            await asyncio.sleep(self.random.choice((0.0, 0.3, 3.0)))

    # ── what is seen ────────────────────────────────────────────────────────────────────────────────────

    def _committed(self, process: Process) -> None:
        rows = self.view.execute('SELECT "offset", id FROM applied ORDER BY rowid').fetchall()
        for offset, id_ in rows[len(self.applied) :]:
            self.history.note(process, "has committed %d", offset)
            self.applied.append(offset)
            if offset != len(self.applied):
                self.accuse(f"{process} applied {offset} as number {len(self.applied)}")
            if self.known.get(id_, offset) != offset:
                self.accuse(f"{id_} was acknowledged at {self.known[id_]}, and applied at {offset}")

    def _confirmed(self, process: Process | str, position: int) -> None:
        self.history.note(process, "the cursor is at %d", position)
        if position > len(self.applied):
            self.accuse(f"the cursor is at {position}, but only {len(self.applied)} facts are applied")
        if position < self._cursor:
            self.accuse(f"the cursor moved back from {self._cursor} to {position}")
        self._cursor = position

    def _check_log(self, store: Any) -> None:
        with sqlite3.connect(store.directory / "boundary.db") as log:
            rows = log.execute('SELECT "offset", message_id FROM facts ORDER BY "offset"').fetchall()
            cursor = log.execute("SELECT coalesce(max(position), 0) FROM cursors").fetchone()[0]
        log.close()
        if [offset for offset, _ in rows] != list(range(1, len(rows) + 1)):
            self.accuse(f"the offsets have holes: {rows}")
        lost = {id_: offset for id_, offset in self.known.items() if (offset, id_) not in rows}
        if lost:
            self.accuse(f"acknowledged facts are not in the log: {lost}")
        self._confirmed("the log", cursor)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────

    def is_over(self) -> bool:
        return self._cursor == len(self.known)

    def check(self) -> None:
        if self.server.boundary is not None:
            self._check_log(self.server.boundary.store)
        if len(self.applied) != len(self.known) or not self.is_over():
            self.accuse(f"{len(self.known)} facts, {len(self.applied)} applied, {self._cursor} confirmed")

    def close(self) -> None:
        if "view" in self.__dict__:
            self.view.close()


@cache
def template() -> Path:
    path = template_folder("facts") / "business.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute('CREATE TABLE applied ("offset" INTEGER, id TEXT)')
    for statement in OncePerId._create:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path
