"""The work that all benchmarks share: 20,000 transactions that do nothing, in batches of 100."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.task.mixins.policies import ConsumerPolicy

COUNT = 20_000
BATCH = 100
TRANSACTIONS = [Transaction(id=str(number)) for number in range(COUNT)]


class Source:
    """Delivers slices of a list."""

    def __init__(self) -> None:
        self._at = 0

    def fetch_transactions(self, size: int) -> list[Transaction]:
        batch = TRANSACTIONS[self._at : self._at + size]
        self._at += size
        return batch

    async def fetch_transactions_async(self, size: int) -> list[Transaction]:
        return self.fetch_transactions(size)


def handle(transaction: Transaction) -> None:
    return None


async def handle_async(transaction: Transaction) -> None:
    return None


class NoOp(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None:
        return None


class AsyncNoOp(AsyncConsumerTask):
    async def process_transaction(self, transaction: Transaction) -> None:
        return None


def policy(concurrency: int = 1, mode: str = "batch", timeout: float | None = None) -> ConsumerPolicy:
    return ConsumerPolicy.model_validate(
        {
            "loop": {"batch": {"size": BATCH}, "concurrency": {"value": concurrency}, "mode": mode},
            "steps": {"process": {"retry": {"timeout": timeout}}},
        }
    )


def threads(given: ConsumerPolicy) -> Callable[[], object]:
    def run() -> None:
        report = NoOp({"source": Source()}).consume_transactions(given)
        assert report.succeeded == COUNT

    return run


def tasks(given: ConsumerPolicy) -> Callable[[], object]:
    async def consume() -> None:
        report = await AsyncNoOp({"source": Source()}).consume_transactions(given)
        assert report.succeeded == COUNT

    return lambda: asyncio.run(consume())


def batches() -> list[list[Any]]:
    return [TRANSACTIONS[at : at + BATCH] for at in range(0, COUNT, BATCH)]
