"""Count what a source delivers and settles: that is progress, not that a process runs."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from onceward.middleware import Middleware, SourceCalls, StepCall, StepInfo
from onceward.task.exceptions import Postponed
from onceward.telemetry.tallies import AttemptTally
from onceward.transaction import Settlement, Transaction, Verdict

ORDER = (Verdict.DONE, Verdict.FAILED, Verdict.RETURNED)
"""The order of the counts in a row of a `Scoreboard`. The number in flight comes last."""


class Progress(Middleware):
    """Counts deliveries and settlements of one consumer over all its calls, for health and the final summary.

    Written by the engine's threads, read by the one that reports.
    """

    name = "progress"

    def __init__(
        self,
        on_answer: Callable[[], None],
        row: MutableSequence[int] | None = None,
        tally: AttemptTally | None = None,
    ) -> None:
        """`row` is where the counts are kept, if others read them. `tally` counts attempts that no inbox counts."""
        self.row: MutableSequence[int] = array("q", (0, 0, 0, 0)) if row is None else row
        self._tally = tally
        self._failed: dict[int, int] = {}
        """Failed attempts of each delivery that is not settled."""
        self.progress_at = time.monotonic()
        self.asking_since: float | None = None
        self._fetched_at: dict[int, float] = {}
        """When each delivery that is not settled was fetched."""
        self._lock = threading.Lock()
        self._on_answer = on_answer
        self.source: Any = None
        """The connector. One whose deliveries stand for several messages says how these ended: `outcome_of`."""

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        self.source = source.connector

        async def fetch(size: int, **extra: Any) -> Sequence[Transaction]:
            self.asking_since = time.monotonic()
            batch = await source.fetch(size, **extra)
            self._note_fetched(batch)
            return batch

        async def settle(settlements: Sequence[Settlement]) -> None:
            assert source.settle is not None
            await source.settle(settlements)
            self._note_settled(settlements)

        return source.replace(fetch=fetch, settle=None if source.settle is None else settle)

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        tally = self._tally
        if tally is None or step.name != "process":
            return call

        async def process(transaction: Transaction, *more: Any) -> Any:
            began = time.perf_counter()
            try:
                result = await call(transaction, *more)
            except Exception as error:
                postponed = isinstance(error, Postponed)
                tally.count("postponed" if postponed else "failed", time.perf_counter() - began, None)
                if not postponed:
                    self._failed[id(transaction)] = self._failed.get(id(transaction), 0) + 1
                raise
            tally.count("done", time.perf_counter() - began, self._failed.get(id(transaction), 0))
            return result

        return process

    def _note_fetched(self, batch: Sequence[Transaction]) -> None:
        now = time.monotonic()
        self.asking_since = None
        if batch:
            with self._lock:
                self._fetched_at.update((id(transaction), now) for transaction in batch)
            self.progress_at = now
        self.row[3] = len(self._fetched_at)
        self._on_answer()

    def _note_settled(self, settlements: Sequence[Settlement]) -> None:
        outcome_of = getattr(self.source, "outcome_of", None)
        with self._lock:
            for settlement in settlements:
                self._fetched_at.pop(id(settlement.transaction), None)
                self._failed.pop(id(settlement.transaction), None)
                messages = None if outcome_of is None else outcome_of(settlement.transaction)
                if messages is None:
                    self.row[ORDER.index(settlement.verdict)] += 1
                else:
                    for at, number in enumerate(messages):
                        self.row[at] += number
            self.row[3] = len(self._fetched_at)
        self.progress_at = time.monotonic()

    def call_ended(self) -> int:
        """Forget what is not settled and return how many; the row has it until the next fetch."""
        self.asking_since = None
        with self._lock:
            left = len(self._fetched_at)
            self._fetched_at.clear()
            self._failed.clear()
        return left

    def in_flight(self) -> tuple[int, float | None]:
        """How many deliveries are in flight, and when the oldest was fetched."""
        with self._lock:
            return len(self._fetched_at), next(iter(self._fetched_at.values()), None)
