"""Producing from an iterator of a million transactions: memory stays flat."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from bench.measure import Line
from onceward import ProducerTask, Transaction
from onceward.task.mixins.policies import ProducerPolicy

COUNT = 1_000_000


class Produce(ProducerTask):
    def produce_transaction(self, transaction: Transaction) -> None:
        return None


def lines() -> Iterator[Line]:
    policy = ProducerPolicy.model_validate({"loop": {"batch": {"size": 100}, "concurrency": {"value": 4}}})
    task = Produce(connectors={})

    def stream(count: int) -> Iterator[Transaction]:
        return (Transaction(id=str(number), payload={"n": number}) for number in range(count))

    task.produce_transactions(stream(20_000), policy)
    before = peak()
    report = task.produce_transactions(stream(COUNT), policy)
    after = peak()
    assert report.succeeded == COUNT
    grown = after - before
    yield Line(
        "produce 1,000,000 from an iterator",
        before,
        after,
        "≤ 5 MB more",
        grown <= 5,
        f"+{grown:.1f} MB",
        "MB",
    )


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
