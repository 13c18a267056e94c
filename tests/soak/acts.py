"""What random handlers do: short lists of acts, drawn per message and attempt."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from contextlib import suppress
from random import Random
from typing import Any, NoReturn

from onceward import (
    AsyncProducerTask,
    ExceptionCategory,
    Postponed,
    ProducerTask,
    Transaction,
    TransactionException,
)

logger = logging.getLogger("soak.handler")
SHARED = threading.Lock()

Act = tuple[str, float]


class Refused(TransactionException):
    """Has its category in the class."""

    category = ExceptionCategory.BUSINESS


class Unprintable(Exception):
    """A foreign error with hostile attributes."""

    category = "BUSINESS"

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Inner(ProducerTask):
    """A call inside an attempt."""

    def produce_transaction(self, transaction: Transaction, /) -> None:
        time.sleep(transaction.payload)


class AsyncInner(AsyncProducerTask):
    async def produce_transaction(self, transaction: Transaction, /) -> None:
        await asyncio.sleep(transaction.payload)


def draw(rng: Random, limit: float | None) -> list[Act]:
    """A few harmless acts, then an end."""
    acts: list[Act] = []
    for _ in range(rng.randrange(4)):
        name = rng.choice(("log", "log", "extra", "sleep", "burn", "lock", "group"))
        if rng.random() < 0.02:
            name = rng.choice(("fork", "nest"))
        acts.append((name, rng.choice((0.0005, 0.002, 0.01))))
    ends = ["return"] * 10 + ["system"] * 3 + ["business", "refused", "foreign", "text", "postpone"]
    if limit is not None:
        ends += ["late", "late", "stubborn"]
    end = rng.choice(ends)
    return [*acts, (end, 3 * limit + 0.3 if limit is not None and end in ("late", "stubborn") else 0.01)]


def act(acts: list[Act]) -> None:
    for name, seconds in acts:
        if name in ("sleep", "late", "stubborn"):
            time.sleep(seconds)
        elif name == "nest":
            Inner(connectors={}).produce_transactions([Transaction(payload=seconds)] * 2)
        elif name != "group":
            _act(name, seconds)


async def act_async(acts: list[Act]) -> None:
    for name, seconds in acts:
        if name in ("sleep", "late"):
            await asyncio.sleep(seconds)
        elif name == "stubborn":
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(end - time.monotonic())
        elif name == "nest":
            await AsyncInner(connectors={}).produce_transactions([Transaction(payload=seconds)] * 2)
        elif name == "group":
            await _fail_in_group()
        else:
            _act(name, seconds)


async def _fail_in_group() -> None:
    # Leaves `cancelling()` at 1 in the worker's task.
    async def fail() -> NoReturn:
        raise ValueError("a child fails")

    with suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await asyncio.sleep(1)


def _act(name: str, seconds: float) -> None:
    if name == "log":
        logger.warning("%s", "working")
    elif name == "extra":
        logger.info("working", extra={"transaction_id": "mine", "task": "mine", "step": 1, "trace_id": None})
    elif name == "burn":
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
    elif name == "lock":
        with SHARED:
            time.sleep(seconds / 10)
    elif name == "fork":
        _fork()
    elif name == "postpone":
        raise Postponed("not now", delay=seconds)
    elif name != "return":
        raise _error(name)


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _error(name: str) -> Exception:
    if name == "business":
        return TransactionException("no", category=ExceptionCategory.BUSINESS)
    if name == "refused":
        return Refused("no")
    if name == "text":
        error: Any = TransactionException("no")
        error.category = "BUSINESS"
        return error  # type: ignore[no-any-return]
    return Unprintable() if name == "foreign" else ValueError("broken")
