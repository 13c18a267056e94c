"""What a demo has to show, while it runs and at its end."""

from __future__ import annotations

import msgspec

from onceward.cli.demo.balance import Balance


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far each stage is."""

    produced: int = 0
    """Messages that the shop's boundary has acknowledged; orders that are sent twice count twice."""
    duplicates: int = 0
    """Of these, the ones it knew already."""
    appended: int = 0
    """Facts in the shop's log."""
    forwarded: int = 0
    """Facts in the warehouse's log."""
    confirmed: int = 0
    """Facts that the workers are done with, without a hole."""
    applied: int = 0
    """Orders that have taken effect."""
    dead: int = 0
    """Dead letters that are open."""
    redriven: int = 0
    """Dead letters that were sent again and are settled."""
    link_is_up: bool = True


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """The time when the zones did not reach each other, and what they did meanwhile."""

    seconds: float
    appended: int
    """Facts that the shop took."""
    applied: int
    """Orders that the warehouse shipped."""
    waiting: int
    """Facts that waited at the shop when it was over."""


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """A worker killed with -9, and what it left open."""

    worker: str
    process: str
    """The worker's identity: see `Worker.identity`."""
    pid: int
    held: int
    """Orders it had fetched and not settled."""
    applied_but_held: int
    """Of these, the ones to which it had given their effect: delivered again, they must not have it again."""


class Redriven(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter that was sent again after its cause was mended."""

    order: str
    died_of: str
    mended_by: str
    applied: bool


class Result(msgspec.Struct, frozen=True, kw_only=True):
    balance: Balance
    fates: dict[str, int]
    """Orders by what was arranged for them."""
    cut: Cut | None
    crash: Crash | None
    redriven: Redriven | None
    came_again: int
    """Orders that the killed worker held and that were delivered again."""
    recognised: int
    """Deliveries of orders that had been applied before, which the inbox left out. Of the workers that lived to report,
    as are retries and timeouts."""
    retries: int
    timeouts: int
    dead_letters: dict[str, int]
    """Those left, by category."""
    packed_by: dict[str, int]
    """Effects by the process that made them."""
    seconds: float

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the outcome, or with the demo as a proof of it."""
        missing = [
            what
            for what, happened in (
                ("the link was never cut: no facts came through it, or nothing went on meanwhile", self.cut),
                ("no worker was killed: none was ever found in the middle of a batch", self.crash),
                ("no dead letter was redriven: the one that can be mended never died", self.redriven),
            )
            if happened is None
        ]
        return (*self.balance.problems, *missing)
