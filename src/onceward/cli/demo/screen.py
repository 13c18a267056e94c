"""What is shown while a demo runs: bars on a terminal, a line now and then anywhere else. Always on stderr."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onceward.cli.demo.result import Progress
from onceward.cli.demo.setup import SHOP, WAREHOUSE

LINE_EVERY = 2.0
"""Seconds between two lines where there is no terminal."""
BAR = 18
"""Characters of a bar."""


class Screen(AbstractContextManager["Screen"], Protocol):
    """Where the story is told. Shown inside a `with` block."""

    def begin(self, orders: int, messages: int) -> None: ...

    def show(self, progress: Progress) -> None: ...

    def tell(self, news: str, *, bad: bool = False) -> None:
        """Something has happened."""
        ...


def open_screen(console: Console) -> Screen:
    return BarScreen(console) if console.is_terminal else LineScreen(console)


class LineScreen(Screen):
    """For logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: Progress | None = None
        self._next_line = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin(self, orders: int, messages: int) -> None:
        self.tell(f"{orders:,} orders in {messages:,} messages")

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress != self._last and now >= self._next_line:
            self._last, self._next_line = progress, now + LINE_EVERY
            self.tell(
                f"{progress.produced:,} produced   {progress.appended:,} appended   "
                f"{progress.forwarded:,} forwarded   {progress.applied:,} applied   {progress.dead:,} dead   "
                f"{progress.redriven:,} redriven"
            )

    def tell(self, news: str, *, bad: bool = False) -> None:
        self._console.print(news, soft_wrap=True, highlight=False, markup=False)


class BarScreen(Screen):
    """For people who watch."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=10)
        self._orders = self._messages = 0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, orders: int, messages: int) -> None:
        self._orders, self._messages = orders, messages
        self.show(Progress())

    def show(self, progress: Progress) -> None:
        self._live.update(self._stages(progress))

    def tell(self, news: str, *, bad: bool = False) -> None:
        self._live.console.print(Text(news, style="bold red" if bad else "green"))

    def _stages(self, now: Progress) -> Table:
        table = Table.grid(padding=(0, 2))
        for justify in ("left", "left", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        for place, stage, done, total, remark in (
            (SHOP, "produced", now.produced, self._messages, ""),
            ("", "appended", now.appended, self._orders, f"{now.duplicates:,} duplicates"),
            ("link", "forwarded", now.forwarded, self._orders, _link(now)),
            (WAREHOUSE, "applied", now.applied, self._orders - now.dead, ""),
        ):
            table.add_row(Text(place, "bold"), stage, _bar(done, total), f"{done:,}/{total:,}", remark)
        table.add_row("", "dead letters", "", f"{now.dead:,}")
        table.add_row("", "redriven", "", f"{now.redriven:,}")
        return table


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=total, completed=done, width=BAR, complete_style="cyan", finished_style="green")


def _link(now: Progress) -> Text:
    if now.link_is_up:
        return Text("up", style="green")
    return Text(f"CUT, {now.appended - now.forwarded:,} facts wait", style="bold red")
