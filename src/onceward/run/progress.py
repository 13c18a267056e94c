"""Count what a source delivers and settles: that is progress, not that a process runs."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from typing import Any

from onceward.middleware import Middleware, SourceCalls, StepCall, StepInfo
from onceward.task.exceptions import Postponed
from onceward.telemetry.tallies import Attempt, AttemptTally
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
        self._attempts: deque[Attempt] = deque()
        """Ended, and not counted yet: counting them one by one would cost more than a quick handler."""
        self._failed: dict[int, int] = {}
        """Failed attempts of each delivery that is not settled."""
        self.progress_at = time.monotonic()
        self.asking_since: float | None = None
        self._fetched_at: dict[int, tuple[float, Transaction]] = {}
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

        note, failed, now = self._attempts.append, self._failed, time.perf_counter

        async def process(transaction: Transaction, *more: Any) -> Any:
            began = now()
            try:
                result = await call(transaction, *more)
            except Exception as error:
                postponed = isinstance(error, Postponed)
                note(("postponed" if postponed else "failed", now() - began, None))
                if not postponed:
                    failed[id(transaction)] = failed.get(id(transaction), 0) + 1
                raise
            note(("done", now() - began, failed.get(id(transaction), 0) if failed else 0))
            return result

        return process

    def count_attempts(self) -> None:
        """Count the attempts that have ended. From any thread."""
        if self._tally is not None:
            ended: list[Attempt] = []
            with suppress(IndexError):
                while True:
                    ended.append(self._attempts.popleft())
            self._tally.count_all(ended)

    def _note_fetched(self, batch: Sequence[Transaction]) -> None:
        now = time.monotonic()
        self.asking_since = None
        if batch:
            with self._lock:
                self._fetched_at.update((id(each), (now, each)) for each in batch)
            self.progress_at = now
        self.row[3] = len(self._fetched_at)
        self.count_attempts()
        self._on_answer()

    def _note_settled(self, settlements: Sequence[Settlement]) -> None:
        outcome_of = getattr(self.source, "outcome_of", None)
        counts = dict.fromkeys(ORDER, 0)
        self.count_attempts()
        with self._lock:
            for settlement in settlements:
                delivery = id(settlement.transaction)
                self._fetched_at.pop(delivery, None)
                if self._failed:
                    self._failed.pop(delivery, None)
                messages = None if outcome_of is None else outcome_of(settlement.transaction)
                if messages is None:
                    counts[settlement.verdict] += 1
                else:
                    for at, number in enumerate(messages):
                        self.row[at] += number
            for at, verdict in enumerate(ORDER):
                self.row[at] += counts[verdict]
            self.row[3] = len(self._fetched_at)
        self.progress_at = time.monotonic()

    def call_ended(self) -> int:
        """Forget what is not settled and return how many; the row has it until the next fetch."""
        self.count_attempts()
        self.asking_since = None
        with self._lock:
            left = len(self._fetched_at)
            self._fetched_at.clear()
            self._failed.clear()
        return left

    def in_flight(self) -> tuple[int, float | None]:
        """How many deliveries are in flight, and when the oldest was fetched."""
        self.count_attempts()
        with self._lock:
            first = next(iter(self._fetched_at.values()), None)
            return len(self._fetched_at), None if first is None else first[0]

    def deliveries(self) -> list[tuple[Transaction, float]]:
        """The deliveries in flight, and when each was fetched; the oldest first."""
        with self._lock:
            return [(transaction, since) for since, transaction in self._fetched_at.values()]
