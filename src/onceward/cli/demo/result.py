"""What a demo has to show, while it runs and at its end."""

from __future__ import annotations

import msgspec

from onceward.cli.demo.balance import Balance


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the workers are, in orders."""

    applied: int
    dead: int
    duplicates: int
    """Copies that the ledger recognised."""
    redelivered: int
    """Messages that the killed worker had not brought to an end and that were delivered again."""
    in_queue: int
    """Messages that have not come to an end."""

    @property
    def settled(self) -> int:
        return self.applied + self.dead


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """A worker killed with -9, and what it left open."""

    worker: str
    process: str
    """The worker's identity: see `Worker.identity`."""
    pid: int
    held: int
    """Messages it had fetched and not settled."""
    applied_but_held: int
    """Of these, the ones that had taken effect: delivered again, they must not take effect again."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    balance: Balance
    fates: dict[str, int]
    """Orders by what was arranged for them."""
    messages: int
    """Messages sent; those sent twice count twice."""
    duplicates: int
    """Copies that were recognised and left out."""
    crash: Crash | None
    """None: no worker was ever found in the middle of a batch."""
    redelivered: int
    """Messages delivered again because of the crash."""
    recognised: int
    """Redeliveries of messages that had been dealt with, recognised and left out."""
    dead_letters: dict[str, int]
    """By category of the failure."""
    retries: int
    """Of the workers that lived to report, as is the next."""
    timeouts: int
    producing_seconds: float
    consuming_seconds: float

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the outcome, or with the demo as a proof of it."""
        if self.crash is None:
            return (
                *self.balance.problems,
                "no worker was killed: none was ever found in the middle of a batch",
            )
        return self.balance.problems
