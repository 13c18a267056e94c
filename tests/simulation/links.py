"""Two zones that pull from each other over wires that fail: the real links, stores, rules and client calls.

What must hold: a fact that was acknowledged in one zone ends up in both logs, once, and in the order in which its zone
has it; a link confirms nothing that is not in the log of the receiving zone; no fact returns home as a new one.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from onceward.boundary import envelope_for, fact_of
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.errors import BoundaryError
from onceward.boundary.links.link import ZoneLink
from tests.simulation.loop import Process
from tests.simulation.server import Server, client
from tests.simulation.simulation import Program, Simulation

ZONES = {"plant": "hq", "hq": "plant"}
"""Each zone, and the one that it pulls from."""


class LinkWorld(Simulation):
    services = ("plant", "hq")

    def set_up(self, folder: Path) -> None:
        self.folder = folder
        self.servers = {zone: Server(folder / zone, self.wire, zone) for zone in ZONES}
        self.in_server = self.random.random() < 0.5
        """Whether a link runs in the server of the receiving zone, or in a process of its own."""
        self.page = self.random.choice((1, 2, 500))
        self.total = self.random.choice((1, 3, 6))
        self.known: dict[str, dict[str, int]] = {zone: {} for zone in ZONES}
        """Facts that each zone has acknowledged to its producer, with their offsets."""
        self.left = len(ZONES)

    def programs(self) -> dict[str, Program]:
        servers: dict[str, Program] = {zone: self._serving(zone) for zone in ZONES}
        links = {f"{zone}-{number}": self._linking(zone) for zone in ZONES for number in (1, 2)}
        return servers if self.in_server else servers | links

    def _serving(self, zone: str) -> Program:
        async def serve(process: Process) -> None:
            server = self.servers[zone]
            await server.run(process)
            boundary = server.boundary
            assert boundary is not None
            before = boundary.store.advance

            async def advance(name: str, offset: int, at: int | None = None) -> int:
                position = await before(name, offset, at)
                self._confirmed(zone, position)
                return position

            boundary.store.advance = advance  # type: ignore[method-assign]
            self._check_logs()
            if self.in_server:
                await self._link(zone, process, boundary).run()
            await asyncio.Event().wait()

        return serve

    def _linking(self, zone: str) -> Program:
        async def pull(process: Process) -> None:
            await self._link(zone, process, client(self.servers[zone], process, self.wire)).run()

        return pull

    def _link(self, zone: str, process: Process, side: Any) -> ZoneLink:
        @asynccontextmanager
        async def connect() -> AsyncIterator[AsyncBoundaryClient]:
            yield client(self.servers[ZONES[zone]], process, self.wire)

        return ZoneLink(ZONES[zone], connect, side, zone, page=self.page)

    async def use(self) -> None:
        await asyncio.gather(*map(self._produce, ZONES))

    async def _produce(self, zone: str) -> None:
        calls = client(self.servers[zone], self.root, self.wire)
        for number in range(self.total):
            id_ = f"{zone}{number}"
            envelope = envelope_for(id_, from_zone=zone, to_zone=ZONES[zone], produced_at_unix_ms=1)
            while True:
                try:
                    offset = (await calls.append(envelope, fact_of("tank:7", "level", {"n": number}))).offset
                    break
                except BoundaryError as error:
                    if not error.retryable:
                        raise
                    await asyncio.sleep(0.7)
            self.history.note(zone, "has appended %s at %d", id_, offset)
            self.known[zone][id_] = offset
            await asyncio.sleep(self.random.choice((0.0, 0.3, 3.0)))
        self.left -= 1

    # ── what is seen ────────────────────────────────────────────────────────────────────────────────────

    def _log(self, zone: str) -> list[str]:
        """The ids of a zone's log, in its order."""
        file = self.folder / zone / "boundary.db"
        if not file.exists():
            return []
        log = sqlite3.connect(file)
        try:
            return [id_ for (id_,) in log.execute('SELECT message_id FROM facts ORDER BY "offset"')]
        finally:
            log.close()

    def _confirmed(self, source: str, position: int) -> None:
        self.history.note(source, "the cursor of its reader is at %d", position)
        there = set(self._log(ZONES[source]))
        lacking = [id_ for id_ in self._log(source)[:position] if id_ not in there]
        if lacking:
            self.accuse(f"{source} has confirmations of {lacking}, which are not in the other log")

    def _check_logs(self) -> None:
        for zone, other in ZONES.items():
            log = self._log(zone)
            if len(set(log)) != len(log):
                self.accuse(f"a fact is in the log of {zone} twice: {log}")
            lost = [id_ for id_, offset in self.known[zone].items() if log[offset - 1 : offset] != [id_]]
            if lost:
                self.accuse(f"acknowledged facts are not in the log of {zone}: {lost}")
            came, gone = ([id_ for id_ in each if id_.startswith(other)] for each in (log, self._log(other)))
            if came != gone[: len(came)]:
                self.accuse(f"the facts of {other} arrived as {came} instead of {gone}")

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────

    def is_over(self) -> bool:
        return self.left == 0 and all(len(self._log(zone)) == 2 * self.total for zone in ZONES)

    def check(self) -> None:
        self._check_logs()
        if not self.is_over():
            self.accuse(f"not everything arrived: { ({zone: self._log(zone) for zone in ZONES}) }")

    def close(self) -> None:
        return
