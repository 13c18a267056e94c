"""What a run has come to, summed up at its end."""

from __future__ import annotations

from collections import Counter

from onceward.run.messages import WorkerStatus


class Totals:
    """What each consumer has done, in all workers that have ended, as far as they could still say it."""

    def __init__(self) -> None:
        self._of: dict[str, Counter[str]] = {}

    def add(self, last: WorkerStatus | None) -> None:
        for each in last.consumers if last is not None else ():
            counts = {"succeeded": each.succeeded, "failed": each.failed, "given back": each.returned}
            self._of.setdefault(each.name, Counter()).update(counts)

    @property
    def failed(self) -> int:
        return sum(counts["failed"] for counts in self._of.values())

    def __str__(self) -> str:
        return "; ".join(f"{name}: {_listed(counts)}" for name, counts in self._of.items()) or "nothing done"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count or what == "succeeded")
