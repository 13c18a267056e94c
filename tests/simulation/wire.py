"""What lies between processes and services, and what goes wrong there.

Each seed draws which kinds of faults there are, and how often: a seed with few of them shows what many would hide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NoReturn, TypeVar

from tests.simulation.history import History
from tests.simulation.loop import Process, SimulatedLoop

T = TypeVar("T")

HANG = 4.0
"""Seconds after which a caller gives up on a silent service."""


QUIET = 0.25
"""How often nothing happens but deaths: only then it is certain that a lease must not end."""


class WireLost(Exception):
    """There is no reply. Whether the request arrived, the caller cannot know."""


@dataclass
class Faults:
    """How often things go wrong: probabilities for each crossing, and seconds between events."""

    delay: float = 0.01
    lost_request: float = 0.0
    lost_reply: float = 0.0
    crash: float = 0.0
    refused: float = 0.0
    """How often the outside world does not answer, or did it and does not say so."""
    kills: float = 0.0
    """Seconds between kills at any moment, on average; 0 is never. The same for the next three."""
    stops: float = 0.0
    jumps: float = 0.0
    partitions: float = 0.0

    @classmethod
    def drawn(cls, random: Random) -> Faults:
        def sometimes(*values: float) -> float:
            return random.choice(values) if random.random() < 0.5 else 0.0

        if random.random() < QUIET:
            return cls(crash=sometimes(0.005, 0.02), kills=sometimes(5.0, 15.0))
        return cls(
            delay=random.choice((0.001, 0.01, 0.05, 0.3)),
            lost_request=sometimes(0.002, 0.01, 0.05),
            lost_reply=sometimes(0.002, 0.01, 0.05),
            crash=sometimes(0.001, 0.005, 0.02),
            refused=sometimes(0.4, 0.8),
            kills=sometimes(5.0, 15.0),
            stops=sometimes(5.0, 15.0),
            jumps=sometimes(5.0, 15.0),
            partitions=sometimes(5.0, 15.0),
        )

    def are_kind_to_leases(self) -> bool:
        """Whether a lease can only end because its owner is dead."""
        lost = self.lost_request + self.lost_reply + self.stops + self.jumps + self.partitions
        return not lost and self.delay <= 0.05

    def are_deadly(self) -> bool:
        """Whether an attempt can fail, or its process die, by no fault of its message."""
        return bool(self.crash or self.kills or self.stops or self.refused or self.partitions or self.lost())

    def lost(self) -> float:
        return self.lost_request + self.lost_reply


class Wire:
    def __init__(self, loop: SimulatedLoop, random: Random, faults: Faults, history: History) -> None:
        self.loop = loop
        self.random = random
        self.faults = faults
        self.history = history

    async def send(self, process: Process, to: str, what: str) -> None:
        """A request on its way to a service. Raises `WireLost` if it does not arrive."""
        await self.travel()
        if to in process.cut_off:
            if self.random.random() < 0.5:
                await asyncio.sleep(HANG)
            self.lose(process, to, what, "never arrived: partition")
        if self.random.random() < self.faults.lost_request:
            self.lose(process, to, what, "never arrived")
        await self.crash_perhaps(process, f"before {to} got {what}")

    async def receive(self, process: Process, to: str, what: str) -> None:
        """The reply on its way back. Raises `WireLost` if it does not arrive."""
        await self.crash_perhaps(process, f"after {to} did {what}")
        if self.random.random() < self.faults.lost_reply or to in process.cut_off:
            self.lose(process, to, what, "was done, but the reply was lost")
        if self.random.random() < 0.3:
            await self.travel()

    async def call(self, process: Process, to: str, what: str, action: Callable[[], T]) -> T:
        """Call a service that does the work in one step."""
        await self.send(process, to, what)
        result = action()
        await self.receive(process, to, what)
        return result

    async def travel(self) -> None:
        await asyncio.sleep(self.random.expovariate(1 / self.faults.delay))

    async def crash_perhaps(self, process: Process, where: str) -> None:
        if self.random.random() < self.faults.crash and process.mortal:
            self.history.note(process, "dies %s", where)
            self.loop.kill(process)
            await self.loop.create_future()

    def lose(self, process: Process, to: str, what: str, how: str) -> NoReturn:
        self.history.note(process, "%s: %s %s", to, what, how)
        raise WireLost(f"no reply from {to} to {what}")
