"""What is shown at the end of a demo: tables and a verdict for people, the same as one object for machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onceward.cli.demo.orders import Fate
from onceward.cli.demo.result import Result
from onceward.cli.demo.setup import MAX_DELIVERIES, SHOP, STEP_TIMEOUT, WAREHOUSE, Setup

WHY = (
    "Delivery is at least once. Each effect is there once because it is written",
    "in one transaction with the inbox's record of its order.",
)
READ_NEXT = f"Read next: {os.path.relpath(Path(__file__).with_name('tasks.py'))}, the two tasks of this demo."

RIGHT, WRONG = Text("✓", "bold green"), Text("✗", "bold red")


def show(console: Console, result: Result) -> None:
    """Print the tables and the verdict. Made for 80 columns."""
    console.print(_what_went_wrong(result))
    console.print(Padding(_what_came_of_it(result), (0, 0, 1, 1)))
    console.print(Padding(_verdict(result), (0, 0, 0, 1)))


def _what_went_wrong(result: Result) -> Table:
    fates, cut, crash, redriven = result.fates, result.cut, result.crash, result.redriven
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("What went wrong")
    table.add_column("count", justify="right", style="bold")
    table.add_column("What was done about it", style="dim")

    def row(name: str, number: int, remark: str) -> None:
        table.add_row(name, f"{number:,}", remark)

    row("sent twice", fates[Fate.TWICE], "known by their ids, appended once")
    if cut is not None:
        meanwhile = f"{cut.appended:,} appended and {cut.applied:,} shipped meanwhile"
        row(f"link cut for {cut.seconds:g} s", cut.waiting, f"waited; {meanwhile}")
    if crash is not None:
        became = f"{crash.applied_but_held:,} shipped, not acknowledged; {result.came_again:,} came again"
        row(f"{crash.worker} killed -9", crash.held, became)
    row("delivered again", result.recognised, "known to the inbox, left out")
    row("service flaky", fates[Fate.FLAKY], "retried")
    row("service hanging", fates[Fate.HANGING], f"interrupted after {STEP_TIMEOUT:g} s, retried")
    row("refused", fates[Fate.REFUSED], "dead letters at once")
    row("poison", fates[Fate.POISON], f"dead letters after {MAX_DELIVERIES} deliveries")
    if redriven is not None:
        became = "shipped" if redriven.applied else "not shipped"
        row("article not listed", fates[Fate.UNLISTED], f"dead letter, mended, redriven, {became}")
    return table


def _what_came_of_it(result: Result) -> Table:
    found = result.balance
    table = Table.grid(padding=(0, 2))
    applied = f"{found.applied:,} applied once" if not found.twice else f"{found.applied:,} applied"
    for place, total, parts, is_right in (
        (
            SHOP,
            f"{found.produced:,} produced",
            f"{found.appended:,} appended + {found.duplicates:,} duplicates",
            found.produced == found.messages == found.appended + found.duplicates,
        ),
        (
            "link",
            f"{found.appended:,} appended",
            f"{found.forwarded:,} forwarded, in the same order",
            found.same_log,
        ),
        (
            WAREHOUSE,
            f"{found.forwarded:,} forwarded",
            f"{applied} + {found.dead_letters:,} dead letters",
            found.forwarded == found.applied + found.dead_letters,
        ),
        (
            "ledger",
            f"{found.pieces:,} pieces",
            f"those of {found.applied:,} orders; {found.lost:,} lost, {found.twice:,} applied twice",
            found.pieces == found.expected_pieces and not found.lost and not found.twice,
        ),
    ):
        table.add_row(Text(place, "bold"), total, f"= {parts}", RIGHT if is_right else WRONG)
    return table


def _verdict(result: Result) -> RenderableType:
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


def as_dict(setup: Setup, result: Result) -> dict[str, Any]:
    """The result, ready for JSON. Durations are seconds."""
    figures: dict[str, Any] = msgspec.to_builtins(result)
    figures["balance"].pop("problems")
    return {
        "balanced": not result.problems,
        "problems": list(result.problems),
        "seed": setup.seed,
        "workers": setup.workers,
        **figures,
    }
