"""One round of the soak test: a random task, random disturbances, and the model's verdict.

    python -m tests.soak.round SEED

Prints what it did as JSON on its last line, or what is wrong with exit code 1.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from onceward import AsyncConsumerTask, ConsumerPolicy, ConsumerTask, Report, Transaction
from onceward.task.exceptions import LoopError
from onceward.task.settings import EngineSettings
from tests.soak import sabotage
from tests.soak.acts import Act, act, act_async, draw
from tests.soak.diary import Diary
from tests.soak.model import Rules, check
from tests.soak.source import AsyncSource, Source

STALL = 100.0
"""Seconds after which a round prints all its stacks and exits."""


class Plan:
    """Everything random about a round, drawn from its seed before it begins."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.asynchronous = rng.random() < 0.5
        self.limit = rng.choice((None, 0.2, 0.4))
        self.attempts = rng.choice((1, 2, 3))
        self.handler_attempts = rng.choice((1, 2))
        self.grace = rng.choice((0.3, 3.0))
        self.ids = [f"m{number}" for number in range(rng.choice((5, 40, 120)))]
        self.disturbance = rng.choice(("none", "none", "stop", "signal", "hurry", "cancel"))
        self.transaction_timeout = rng.choice((None, None, 0.6))
        retry = {"max_attempts": self.handler_attempts}
        self.policy = ConsumerPolicy.model_validate(
            {
                "loop": {
                    "mode": rng.choice(("batch", "continuous")),
                    "batch": {"size": rng.choice((1, 7, 50))},
                    "concurrency": {"value": rng.choice((1, 3, 8, 30))},
                    "transaction_timeout": self.transaction_timeout,
                },
                "steps": {
                    "process": {
                        "retry": {
                            "max_attempts": self.attempts,
                            "timeout": self.limit,
                            "backoff": rng.choice((0.0, 0.005, 0.05)),
                        }
                    },
                    "success": {"retry": retry},
                    "exception": {"retry": retry},
                },
            }
        )
        self._seed = seed

    def acts(self, id: str, entry: int) -> list[Act]:
        rng = Random(f"{self._seed} {id} {entry}")
        return draw(rng, self.limit) if entry < 12 else [("return", 0.0)]

    def handler_acts(self, step: str, id: str) -> list[Act]:
        rng = Random(f"{self._seed} {id} {step}")
        return [("log", 0.0)] if rng.random() < 0.9 else [("system", 0.0)]

    def rules(self) -> Rules:
        bounded = self.transaction_timeout is not None
        disturbed = self.disturbance in ("hurry", "cancel")
        return Rules(self.attempts, self.handler_attempts, self.limit, self.grace, bounded, disturbed)


class BlockingTask(ConsumerTask):
    plan: Plan
    diary: Diary
    interruptible = True

    def process_transaction(self, transaction: Transaction, /, *_: Any, **__: Any) -> None:
        with self.diary.visit("process", transaction):
            act(self.plan.acts(transaction.id, self.diary.count(transaction.id)))

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> None:
        with self.diary.visit("success", transaction):
            act(self.plan.handler_acts("success", transaction.id))

    def handle_transaction_exception(self, transaction: Transaction, exc: Any) -> None:
        with self.diary.visit("exception", transaction):
            act(self.plan.handler_acts("exception", transaction.id))


class AsyncTask(AsyncConsumerTask):
    plan: Plan
    diary: Diary
    interruptible = True

    async def process_transaction(self, transaction: Transaction, /, *_: Any, **__: Any) -> None:
        with self.diary.visit("process", transaction):
            await act_async(self.plan.acts(transaction.id, self.diary.count(transaction.id)))

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> None:
        with self.diary.visit("success", transaction):
            await act_async(self.plan.handler_acts("success", transaction.id))

    async def handle_transaction_exception(self, transaction: Transaction, exc: Any) -> None:
        with self.diary.visit("exception", transaction):
            await act_async(self.plan.handler_acts("exception", transaction.id))


class Round:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.diary = Diary()
        self.source = Source(self.diary, plan.ids)
        settings = EngineSettings(stuck_grace=plan.grace)
        self.task: BlockingTask | AsyncTask
        if plan.asynchronous:
            self.task = AsyncTask(connectors={"source": AsyncSource(self.source)}, settings=settings)
        else:
            self.task = BlockingTask(connectors={"source": self.source}, settings=settings)
        self.task.plan, self.task.diary = plan, self.diary
        self.reports: list[Report] = []
        self.running: asyncio.Task[Report] | None = None

    def run(self) -> None:
        """Consume, call after call, until every id has an end."""
        end = time.monotonic() + STALL - 20
        while len(self.source.ended) < len(self.plan.ids) and time.monotonic() < end:
            disturber = threading.Thread(target=self._disturb, daemon=True)
            disturber.start()
            self.reports.append(
                asyncio.run(self._consume_async()) if self.plan.asynchronous else self._consume()
            )
            disturber.join()
            if not self.source.waiting:
                self._wait_for_stuck_visits()
                self.source.expire()
                time.sleep(0.02)

    def _consume(self) -> Report:
        assert isinstance(self.task, BlockingTask)
        try:
            return self.task.consume_transactions(self.plan.policy)
        except LoopError as error:
            return error.report or Report()

    async def _consume_async(self) -> Report:
        assert isinstance(self.task, AsyncTask)
        self.running = asyncio.create_task(self.task.consume_transactions(self.plan.policy))
        try:
            return await self.running
        except LoopError as error:
            return error.report or Report()
        except asyncio.CancelledError:
            return Report()

    def _disturb(self) -> None:
        kind, rng = self.plan.disturbance, self.plan.rng
        if kind == "none" or rng.random() < 0.3:
            return
        time.sleep(rng.choice((0.0, 0.02, 0.2, 0.6)))
        if kind == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif kind == "cancel" and self.running is not None:
            self._cancel(self.running)
        else:
            self.task.stop()
            if kind == "hurry":
                time.sleep(0.02)
                self.task.hurry()

    def _cancel(self, running: asyncio.Task[Report]) -> None:
        with suppress(RuntimeError):  # its loop has ended
            running.get_loop().call_soon_threadsafe(running.cancel)

    def _wait_for_stuck_visits(self) -> None:
        def running() -> bool:
            return any(
                visit.ended is None for each in list(self.diary.deliveries.values()) for visit in each.visits
            )

        end = time.monotonic() + 10
        while running() and time.monotonic() < end:
            time.sleep(0.01)


def check_leaks() -> list[str]:
    """Threads and tasks of the engine that outlive their call."""

    def engines() -> list[str]:
        names = [each.name for each in threading.enumerate()]
        return [each for each in names if each.startswith("onceward") and each != "onceward-log"]

    end = time.monotonic() + 10
    while (alive := engines()) and time.monotonic() < end:
        time.sleep(0.01)
    return [f"threads are left: {alive}"] if alive else []


def check_logging() -> list[str]:
    """A log line of anyone's own still works, from another thread too."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    mine = logging.getLogger("soak.after")
    mine.addHandler(handler)
    thread = threading.Thread(target=mine.warning, args=("still %s", "here"), daemon=True)
    thread.start()
    thread.join(10)
    return [] if seen == ["still here"] else ["logging no longer works"]


def main(seed: int) -> int:
    faulthandler.dump_traceback_later(STALL, exit=True)
    warnings.simplefilter("ignore", DeprecationWarning)  # os.fork in a process with threads
    plan = Plan(seed)
    hooks: list[str] = []
    report_unraisable: Callable[[Any], Any] = lambda args: hooks.append(str(args.exc_value))  # noqa: E731
    sys.unraisablehook = report_unraisable
    threading.excepthook = report_unraisable
    logged = sabotage.install_logging(plan.rng, handlers_may_raise=True)
    logging.raiseExceptions = False
    with sabotage.telemetry(plan.rng) as spans:
        this = Round(plan)
        signal.signal(signal.SIGUSR1, lambda *_: this.task.stop())
        this.run()
    gc.collect()
    rules = plan.rules()
    problems = check(this.diary, rules, this.reports, this.source.ended, plan.ids)
    if plan.disturbance == "cancel" and plan.asynchronous:
        problems = [each for each in problems if "reports" not in each]  # a cancelled call returns no report
    problems += check_leaks() + check_logging() + [f"unraisable: {each}" for each in hooks]
    if problems:
        drawn = {
            key: value for key, value in vars(plan).items() if key not in ("_seed", "rng", "ids", "policy")
        }
        drawn["policy"] = plan.policy.model_dump(exclude_defaults=True)
        print(f"{len(problems)} problems, logging {logged}, telemetry {spans}, {drawn}")
        print(*problems[:20], sep="\n")
        return 1
    visits = sum(len(each.visits) for each in this.diary.deliveries.values())
    stuck = sum(report.stuck for report in this.reports)
    print(
        json.dumps(
            {
                "messages": len(plan.ids),
                "calls": len(this.reports),
                "deliveries": len(this.diary.deliveries),
                "visits": visits,
                "timeouts": sum(report.timed_out for report in this.reports),
                "stuck": stuck,
                "abandoned": sum(report.abandoned for report in this.reports),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
