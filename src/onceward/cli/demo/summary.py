"""What is shown at the end of a demo: a table and a verdict for people, the same as one object for machines."""

from __future__ import annotations

from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from onceward.cli.demo.orders import Fate
from onceward.cli.demo.result import Result
from onceward.cli.demo.setup import MAX_DELIVERIES, STEP_TIMEOUT, Setup

WHY = (
    "Delivery is at least once. Each effect is there once because the ledger writes it in one transaction "
    "with the order's id."
)
READ_NEXT = "Read next: onceward/cli/demo/tasks.py, the tasks of this demo, and ledger.py beside it."


def show(console: Console, result: Result) -> None:
    """Print the table and the verdict."""
    console.print(_table(result))
    console.print(_verdict(result))


def _table(result: Result) -> Table:
    balance, fates = result.balance, result.fates
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")

    def row(name: str, number: int, remark: str = "", *, last: bool = False) -> None:
        table.add_row(name, f"{number:,}", remark, end_section=last)

    row("sent twice", fates[Fate.TWICE], f"{result.duplicates:,} copies recognised and left out")
    row("card refused", fates[Fate.REFUSED], "dead letters at once, without a retry")
    row("service flaky", fates[Fate.FLAKY], "retried")
    row("service hanging", fates[Fate.HANGING], f"interrupted after {STEP_TIMEOUT:g} s and retried")
    row("poison", fates[Fate.POISON], f"dead letters after {MAX_DELIVERIES} deliveries")
    if result.crash is not None:
        row("held at the kill", result.crash.held, _after_the_kill(result), last=True)
    row("produced", balance.produced, f"orders, in {result.messages:,} messages")
    row("applied", balance.applied, f"{_money(balance.ledger_cents)} in the ledger")
    row("dead-lettered", balance.dead_lettered, _listed(result.dead_letters))
    row("lost", balance.lost)
    return table


def _after_the_kill(result: Result) -> str:
    return f"{result.redelivered:,} delivered again, {result.recognised:,} recognised and left out"


def _listed(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in sorted(numbers.items()))


def _money(cents: int) -> str:
    return f"{cents // 100:,}.{cents % 100:02}"


def _verdict(result: Result) -> RenderableType:
    balance = result.balance
    if result.problems:
        return Group(
            Text("It does not balance:", style="bold red"),
            *(Text(f"  - {problem}", style="red") for problem in result.problems),
        )
    return Group(
        Text(
            f"It balances: {balance.produced:,} produced = {balance.applied:,} applied + "
            f"{balance.dead_lettered:,} dead-lettered; nothing lost, nothing applied twice.",
            style="bold green",
        ),
        Text(WHY),
        Text(READ_NEXT, style="dim"),
    )


def as_dict(setup: Setup, result: Result) -> dict[str, Any]:
    """The result, ready for JSON. Cents are whole numbers, durations are seconds."""
    figures: dict[str, Any] = msgspec.to_builtins(result)
    figures["balance"].pop("problems")
    return {
        "balanced": not result.problems,
        "problems": list(result.problems),
        "seed": setup.seed,
        "workers": setup.workers,
        **figures,
    }
