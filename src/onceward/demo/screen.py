"""What a demo shows: bars on a terminal or lines elsewhere while it runs, tables and a verdict at its end."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onceward.demo.balance import DemoBalance
from onceward.demo.orders import Fate
from onceward.demo.setup import MAX_DELIVERIES, SHOP, STEP_TIMEOUT, WAREHOUSE, Setup

LINE_EVERY = 2.0
"""Seconds between two lines without a terminal."""
BAR = 18
"""Characters of a bar."""
WHY = (
    "Delivery is at least once. Each effect happens once because it is written in",
    "one transaction with the inbox's record of its order.",
)
READ_NEXT = f"Read next: {os.path.relpath(Path(__file__).with_name('tasks.py'))}, the two tasks of this demo."
RIGHT, WRONG = Text("✓", "bold green"), Text("✗", "bold red")


class DemoProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far each stage is."""

    produced: int = 0
    """Messages that the shop's boundary has acknowledged; orders sent twice count twice."""
    duplicates: int = 0
    """Those of them that it already had."""
    appended: int = 0
    """Facts in the shop's log."""
    forwarded: int = 0
    """Facts in the warehouse's log."""
    confirmed: int = 0
    """Facts that the workers have finished, without gaps."""
    applied: int = 0
    """Orders that have taken effect."""
    dead: int = 0
    """Open dead letters."""
    redriven: int = 0
    """Dead letters that were redriven and settled."""
    link_is_up: bool = True


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """The time without a link between the zones, and what they did meanwhile."""

    seconds: float
    appended: int
    """Facts that the shop appended."""
    applied: int
    """Orders that the warehouse shipped."""
    waiting: int
    """Facts waiting at the shop at the end."""


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """A worker killed with -9 and what it left open."""

    worker: str
    process: str
    """The worker's identity: see `DemoWorker.identity`."""
    pid: int
    held: int
    """Orders it had fetched and not settled."""
    applied_but_held: int
    """Those of them that it had shipped: redelivered, they must not be shipped again."""


class RedrivenLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter that was redriven after its cause was fixed."""

    order: str
    died_of: str
    mended_by: str
    applied: bool


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    balance: DemoBalance
    fates: dict[str, int]
    """Orders by their fate."""
    cut: Cut | None
    crash: Crash | None
    redriven: RedrivenLetter | None
    came_again: int
    """Orders of the killed worker that were delivered again."""
    recognised: int
    """Deliveries that the inbox skipped because the order was already applied. Counted, like retries and timeouts, by
    the workers that lived to report."""
    retries: int
    timeouts: int
    dead_letters: dict[str, int]
    """Open dead letters by category."""
    packed_by: dict[str, int]
    """Effects by process."""
    seconds: float

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the outcome, or with the demo as a proof."""
        missing = [
            what
            for what, happened in (
                ("the link was never cut: no facts passed it, or no work was done meanwhile", self.cut),
                ("no worker was killed: none was found in the middle of a batch", self.crash),
                ("no dead letter was redriven: the one with a fixable cause never died", self.redriven),
            )
            if happened is None
        ]
        return (*self.balance.problems, *missing)


class Screen(AbstractContextManager["Screen"], Protocol):
    """Shows a demo inside a `with` block."""

    def begin(self, orders: int, messages: int) -> None: ...

    def show(self, progress: DemoProgress) -> None: ...

    def announce(self, news: str, *, bad: bool = False) -> None:
        """Show an event."""
        ...


def open_screen(console: Console) -> Screen:
    return BarScreen(console) if console.is_terminal else LineScreen(console)


class LineScreen(Screen):
    """For logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: DemoProgress | None = None
        self._next_line = 0.0

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, orders: int, messages: int) -> None:
        self.announce(f"{orders:,} orders in {messages:,} messages")

    def show(self, progress: DemoProgress) -> None:
        now = time.monotonic()
        if progress != self._last and now >= self._next_line:
            self._last, self._next_line = progress, now + LINE_EVERY
            self.announce(
                f"{progress.produced:,} produced   {progress.appended:,} appended   "
                f"{progress.forwarded:,} forwarded   {progress.applied:,} applied   {progress.dead:,} dead   "
                f"{progress.redriven:,} redriven"
            )

    def announce(self, news: str, *, bad: bool = False) -> None:
        self._console.print(news, soft_wrap=True, highlight=False, markup=False)


class BarScreen(Screen):
    """For terminals."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=10)
        self._orders = self._messages = 0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, orders: int, messages: int) -> None:
        self._orders, self._messages = orders, messages
        self.show(DemoProgress())

    def show(self, progress: DemoProgress) -> None:
        self._live.update(self._stages(progress))

    def announce(self, news: str, *, bad: bool = False) -> None:
        self._live.console.print(Text(news, style="bold red" if bad else "green"))

    def _stages(self, now: DemoProgress) -> Table:
        table = Table.grid(padding=(0, 2))
        for justify in ("left", "left", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        for place, stage, done, total, remark in (
            (SHOP, "produced", now.produced, self._messages, ""),
            ("", "appended", now.appended, self._orders, f"{now.duplicates:,} duplicates"),
            ("link", "forwarded", now.forwarded, self._orders, _link(now)),
            (WAREHOUSE, "applied", now.applied, self._orders - now.dead, ""),
        ):
            bar = ProgressBar(total, done, width=BAR, complete_style="cyan", finished_style="green")
            table.add_row(Text(place, "bold"), stage, bar, f"{done:,}/{total:,}", remark)
        table.add_row("", "dead letters", "", f"{now.dead:,}")
        table.add_row("", "redriven", "", f"{now.redriven:,}")
        return table


def _link(now: DemoProgress) -> Text:
    if now.link_is_up:
        return Text("up", style="green")
    return Text(f"CUT, {now.appended - now.forwarded:,} facts waiting", style="bold red")


# ── at the end ──────────────────────────────────────────────────────────────────────────────────────────


def show(console: Console, result: DemoResult) -> None:
    """Print the tables and the verdict, in 80 columns."""
    console.print(_failures(result))
    console.print(Padding(_equations(result), (0, 0, 1, 1)))
    console.print(Padding(_verdict(result), (0, 0, 0, 1)))


def _failures(result: DemoResult) -> Table:
    fates, cut, crash, redriven = result.fates, result.cut, result.crash, result.redriven
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("What went wrong")
    table.add_column("count", justify="right", style="bold")
    table.add_column("How it was handled", style="dim")

    def row(name: str, number: int, remark: str) -> None:
        table.add_row(name, f"{number:,}", remark)

    row("sent twice", fates[Fate.TWICE], "recognized by id, appended once")
    if cut is not None:
        meanwhile = f"{cut.appended:,} appended and {cut.applied:,} shipped meanwhile"
        row(f"link cut for {cut.seconds:g} s", cut.waiting, f"waited; {meanwhile}")
    if crash is not None:
        became = f"{crash.applied_but_held:,} shipped, not acknowledged; {result.came_again:,} redelivered"
        row(f"{crash.worker} killed -9", crash.held, became)
    row("redelivered", result.recognised, "recognized by the inbox, skipped")
    row("service flaky", fates[Fate.FLAKY], "retried")
    row("service hanging", fates[Fate.HANGING], f"interrupted after {STEP_TIMEOUT:g} s, retried")
    row("refused", fates[Fate.REFUSED], "dead letters at once")
    row("poison", fates[Fate.POISON], f"dead letters after {MAX_DELIVERIES} deliveries")
    if redriven is not None:
        became = "shipped" if redriven.applied else "not shipped"
        row("article not listed", fates[Fate.UNLISTED], f"dead letter, fixed, redriven, {became}")
    return table


def _equations(result: DemoResult) -> Table:
    found = result.balance
    table = Table.grid(padding=(0, 2))
    applied = f"{found.applied:,} applied once" if not found.twice else f"{found.applied:,} applied"

    def row(place: str, total: str, parts: str, is_right: bool) -> None:
        table.add_row(Text(place, "bold"), total, f"= {parts}", RIGHT if is_right else WRONG)

    parts = f"{found.appended:,} appended + {found.duplicates:,} duplicates"
    is_right = found.produced == found.messages == found.appended + found.duplicates
    row(SHOP, f"{found.produced:,} produced", parts, is_right)
    parts = f"{found.forwarded:,} forwarded, in the same order"
    row("link", f"{found.appended:,} appended", parts, found.same_log)
    parts = f"{applied} + {found.dead_letters:,} dead letters"
    is_right = found.forwarded == found.applied + found.dead_letters
    row(WAREHOUSE, f"{found.forwarded:,} forwarded", parts, is_right)
    parts = f"those of {found.applied:,} orders; {found.lost:,} lost, {found.twice:,} applied twice"
    is_right = found.pieces == found.expected_pieces and not found.lost and not found.twice
    row("ledger", f"{found.pieces:,} pieces", parts, is_right)
    return table


def _verdict(result: DemoResult) -> RenderableType:
    if result.problems:
        return Group(
            Text("It does not balance:", style="bold red"),
            *(Text(f"  - {problem}", style="red") for problem in result.problems),
        )
    return Group(
        Text(f"It balances, after {result.seconds:.0f} s.", style="bold green"),
        *map(Text, WHY),
        Text(READ_NEXT, style="dim"),
    )


def as_dict(setup: Setup, result: DemoResult) -> dict[str, Any]:
    """The result for JSON. Durations are in seconds."""
    figures: dict[str, Any] = msgspec.to_builtins(result)
    figures["balance"].pop("problems")
    return {
        "balanced": not result.problems,
        "problems": list(result.problems),
        "seed": setup.seed,
        "workers": setup.workers,
        **figures,
    }
