"""What is shown while a demo runs: bars on a terminal, a line now and then anywhere else. Always on stderr."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from onceward.cli.demo.crew import Worker
from onceward.cli.demo.result import Crash, Progress

LINE_EVERY = 2.0
"""Seconds between two lines where there is no terminal."""


class Screen(AbstractContextManager["Screen"], Protocol):
    """Where the story is told. Shown inside a `with` block."""

    def begin_producing(self, messages: int) -> None: ...

    def sent(self) -> None:
        """One more message is in the queue. Called from any thread."""
        ...

    def begin_consuming(self, orders: int) -> None: ...

    def consuming(self, progress: Progress) -> None: ...

    def started(self, worker: Worker) -> None: ...

    def killed(self, crash: Crash) -> None: ...


def open_screen(console: Console) -> Screen:
    return BarScreen(console) if console.is_terminal else LineScreen(console)


def counters(progress: Progress) -> str:
    return (
        f"{progress.applied:,} applied   {progress.dead:,} dead letters   "
        f"{progress.duplicates:,} duplicates left out   {progress.redelivered:,} delivered again"
    )


def birth_notice(worker: Worker) -> str:
    return f"{worker.name} started{' again' if worker.life > 1 else ''} (pid {worker.pid})"


def obituary(crash: Crash) -> str:
    return (
        f"{crash.worker} killed with -9: it held {crash.held:,} messages, "
        f"{crash.applied_but_held:,} applied but not acknowledged"
    )


class LineScreen(Screen):
    """For logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._orders = 0
        self._next_line = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin_producing(self, messages: int) -> None:
        self._say(f"producing {messages:,} messages")

    def sent(self) -> None:
        pass

    def begin_consuming(self, orders: int) -> None:
        self._orders = orders
        self._say(f"consuming {orders:,} orders")

    def consuming(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._next_line or progress.in_queue == 0:
            self._next_line = now + LINE_EVERY
            self._say(f"{progress.settled:,} of {self._orders:,} orders settled: {counters(progress)}")

    def started(self, worker: Worker) -> None:
        self._say(birth_notice(worker))

    def killed(self, crash: Crash) -> None:
        self._say(obituary(crash))

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


class BarScreen(Screen):
    """For people who watch."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._counters = Text()
        self._live = Live(Group(self._bars, self._counters), console=console, refresh_per_second=10)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin_producing(self, messages: int) -> None:
        self._producing = self._bars.add_task("producing", total=messages)

    def sent(self) -> None:
        self._bars.advance(self._producing)

    def begin_consuming(self, orders: int) -> None:
        self._consuming = self._bars.add_task("consuming", total=orders)

    def consuming(self, progress: Progress) -> None:
        self._bars.update(self._consuming, completed=progress.settled)
        self._counters.plain = counters(progress)

    def started(self, worker: Worker) -> None:
        self._live.console.print(birth_notice(worker), style="green", highlight=False)

    def killed(self, crash: Crash) -> None:
        self._live.console.print(obituary(crash), style="bold red", highlight=False)
