"""One run: a seed, its faults, its processes, and the verdict."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from onceward.inbox.attempts import Everyone
from onceward.task.deadlines import Clock
from tests.simulation import threads
from tests.simulation.history import Broken, History
from tests.simulation.loop import Endless, Process, SimulatedLoop, collected, here
from tests.simulation.wire import Faults, Wire

T = TypeVar("T")

TROUBLE = 30.0
"""Seconds of simulated time in which things go wrong."""

GROUPED = 10.0
"""Seconds up to which handlers are decided in groups: what they call takes far longer here than a disk."""

Program = Callable[[Process], Coroutine[Any, Any, None]]


class SimulatedClock(Clock):
    """The engine's clock."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.now = loop.time


class _EveryoneHere:
    """Stands for `onceward.inbox.attempts.everyone`, which is one object in each process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own(), name, value)

    def _own(self) -> Any:
        return here().own.setdefault("everyone", Everyone())


class Simulation(ABC):
    """A world with some processes. Subclasses say what runs in them, and what must hold."""

    services: tuple[str, ...]
    """What a process may be cut off from."""
    patience = 4000.0
    """Seconds after the trouble until everything must have ended."""
    in_threads = False
    """Whether its programs use simulated threads."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(f"{type(self).__name__} {seed}")
        self.loop = SimulatedLoop(self.random)
        self.root = self.loop.process("root")
        self.root.mortal = False
        self.history = History(self.loop.time)
        self.faults = Faults.drawn(self.random)
        self._drawn = replace(self.faults)
        self.wire = Wire(self.loop, self.random, self.faults, self.history)
        self.running: dict[str, Process] = {}
        self.trouble = True
        self._lives = 0
        self._judged = False

    # ── what a world defines ────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def set_up(self, folder: Path) -> None: ...

    @abstractmethod
    def programs(self) -> dict[str, Program]:
        """What runs in each process that may be killed. It is started again."""

    @abstractmethod
    async def use(self) -> None:
        """Send everything, while things go wrong."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether everything has ended."""

    @abstractmethod
    def check(self) -> None:
        """Call `accuse` for all that does not hold at the end."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open outside of the processes."""

    def stand_ins(self, clock: Any) -> dict[str, Any]:
        """What this world replaces beside what all do, by its name; `clock` stands for the module `time`."""
        return {}

    # ── the run ─────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> History:
        """Run it to its end. Raises `Broken` with the history if something does not hold."""
        folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=_memory()))
        failure: BaseException | None = None
        with self._installed(), collected():
            try:
                self.set_up(folder)
                main = self.root.start(self._main())
                try:
                    self.loop.run_forever()
                except Endless as endless:
                    self.accuse(str(endless))
                if main.done() and not main.cancelled():
                    failure = main.exception()
            finally:
                self._judged = True  # what ends below is no longer part of the run
                self.loop.bury()
                self.close()
                shutil.rmtree(folder, ignore_errors=True)
        if failure is not None:
            raise failure
        if self.history.problems:
            raise Broken(self._report())
        return self.history

    def prepared(self, make: Callable[..., T], *arguments: Any) -> T:
        """What `make` returns, made now or in an earlier run: so it must not change what the seed draws."""
        state = self.random.getstate()
        made = make(*arguments)
        self.random.setstate(state)
        return made

    def accuse(self, problem: str) -> None:
        """Record that something does not hold, and end the run."""
        if self._judged:
            return
        self.history.accuse(problem)
        self.loop.stop()

    async def _main(self) -> None:
        try:
            programs = self.programs()
            for name in programs:
                self._spawn(name)
            troubles = [self.root.start(cause()) for cause in self.troubles()]
            await self.use()
            while not self.is_over() and self.loop.time() < TROUBLE:
                await asyncio.sleep(1.0)
            for each in troubles:
                each.cancel()
            self.calm_down()
            until = self.loop.time() + self.patience
            while not self.is_over() and self.loop.time() < until:
                await asyncio.sleep(2.0)
            self.history.note("root", "the end")
            self.check()
        finally:
            self.loop.stop()

    def _spawn(self, name: str) -> None:
        self._lives += 1
        process = self.loop.process(f"{name}.{self._lives}")
        process.last_wishes.append(lambda: self._bring_back(name))
        self.running[name] = process
        self.history.note(process, "starts")
        process.start(self._run(self.programs()[name], process))

    async def _run(self, program: Program, process: Process) -> None:
        try:
            await program(process)
        except Exception as error:
            self.accuse(f"the program of {process} failed: {error!r}")

    def _bring_back(self, name: str) -> None:
        self.running.pop(name, None)
        if not self.loop.is_closed():
            delay = self.random.choice((0.1, 1.0, 10.0))
            self.loop.call_later(delay, self._spawn, name, context=self.root.context)

    def calm_down(self) -> None:
        """Let nothing go wrong from here on."""
        self.history.note("root", "nothing goes wrong from here on")
        self.trouble = False
        faults = self.faults
        faults.lost_request = faults.lost_reply = faults.crash = 0.0
        faults.delay = min(faults.delay, 0.01)
        for process in self.running.values():
            process.stopped = False
            process.cut_off.clear()

    def troubles(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What goes wrong by itself, each until it is canceled."""
        return [
            partial(self._repeatedly, every, act)
            for every, act in (
                (self.faults.kills, self._kill),
                (self.faults.stops, self._stop),
                (self.faults.jumps, self._jump),
                (self.faults.partitions, self._cut_off),
            )
            if every
        ]

    # ── trouble ─────────────────────────────────────────────────────────────────────────────────────────

    async def _repeatedly(self, every: float, act: Callable[[Process], None]) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(1 / every))
            if self.running:
                act(self.running[self.random.choice(sorted(self.running))])

    def _kill(self, process: Process) -> None:
        self.history.note(process, "is killed")
        self.loop.kill(process)

    def _stop(self, process: Process) -> None:
        seconds = self.random.choice((0.5, 5.0, 45.0, 45.0))
        self.history.note(process, "stops for %g s", seconds)
        process.stopped = True

        def go_on() -> None:
            self.history.note(process, "continues")
            process.stopped = False

        self.loop.call_later(seconds, go_on, context=self.root.context)

    def _jump(self, process: Process) -> None:
        process.skew += self.random.choice((-60.0, -20.0, -1.0, 1.0, 20.0, 60.0))
        self.history.note(process, "has a clock that is off by %g s", process.skew)

    def _cut_off(self, process: Process) -> None:
        service, seconds = self.random.choice(self.services), self.random.choice((1.0, 8.0, 45.0))
        self.history.note(process, "cannot reach the %s for %g s", service, seconds)
        process.cut_off.add(service)

        def heal() -> None:
            self.history.note(process, "reaches the %s again", service)
            process.cut_off.discard(service)

        self.loop.call_later(seconds, heal, context=self.root.context)

    # ── around it ───────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Take randomness, monotonic time and what is global in a process from the simulation."""
        clock = SimpleNamespace(
            time_ns=lambda: int(here().clock() * 1e9),
            perf_counter=self.loop.time,
            time=lambda: here().clock(),
            monotonic=self.loop.time,
        )
        with ExitStack() as patches:
            for target, value in {
                "onceward.backoff.random": self.random,
                "onceward.connectors.leases.secrets": SimpleNamespace(randbits=self.random.getrandbits),
                "onceward.connectors.owners.secrets": SimpleNamespace(randbits=self.random.getrandbits),
                "onceward.outbox.claims.random": self.random,
                "onceward.connectors.redis_streams.protocol.time": clock,
                "onceward.inbox.attempts.everyone": _EveryoneHere(),
                "onceward.inbox.attempts.monotonic": self.loop.time,
                "onceward.inbox.commits.group.time": clock,
                "onceward.outbox.connections.wall": clock.time,
                "onceward.outbox.rows.wall": clock.time,
                "onceward.task.groups.together.monotonic": self.loop.time,
                "onceward.task.groups.together.LONGEST": GROUPED,
                "onceward.task.groups.pace.QUICK": GROUPED,
                "onceward.task.ports_asyncio.monotonic": self.loop.time,
                "onceward.task.ports_asyncio._outliving": self.loop.outlived,
                "onceward.boundary.stores.sqlite.time": clock,
                **self.stand_ins(clock),
            }.items():
                patches.enter_context(patch(target, value))
            if self.in_threads:
                patches.enter_context(threads.installed(self.loop, self.random))
            yield

    def _report(self) -> str:
        name = type(self).__name__
        return "\n".join(
            [
                f"{name}, seed {self.seed}: {'; '.join(self.history.problems)}",
                f"faults: {self._drawn}",
                *self.history.lines(),
                f"repeat it with: python -m tests.simulation --world {name} --seed {self.seed} --seeds 1",
            ]
        )


def _memory() -> str | None:
    """A directory in memory, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def template_folder(name: str) -> Path:
    """A directory for the life of this process."""
    folder = Path(tempfile.mkdtemp(prefix=f"simulation-{name}-", dir=_memory()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
