"""Verify all consumers of an app at once, each in a process of its own, as many at a time as there are processors."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from onceward._process.usable_fork import UNUSABLE, USABLE_WITHIN, fork_beside_threads, use_sqlite_or_end
from onceward.app.app import Consumer, Onceward
from onceward.errors import ConfigurationError
from onceward.task.lifecycle import text_of
from onceward.verify import interpreters
from onceward.verify.children import Broken, Died, Hung
from onceward.verify.plan import plan_of
from onceward.verify.report import VerificationReport
from onceward.verify.run import run

Watch = Callable[[str, str, int], None]
"""Called with a consumer, the scenario it is at, and how many are done."""


class Examination(msgspec.Struct, frozen=True):
    """The outcome for one consumer: a report, or why there is none."""

    consumer: str
    report: VerificationReport | None = None
    problem: str = ""

    @property
    def passed(self) -> bool:
        return self.report is not None and self.report.passed


def examine_app(
    app: Onceward, *, watch: Watch = lambda *_: None, processes: int | None = None, **given: Any
) -> list[Examination]:
    """Verify every consumer of an app that has a contract, and return their outcomes in the app's order.

    Accepts the fields of `Verification` that are the same for all; they override each consumer's own.
    """
    waiting = [each for each in app.consumers.values() if each.contract is not None]
    if not waiting:
        raise ConfigurationError(f"no consumer of {app.name} has a contract, so there is nothing to prove")
    names = [each.name for each in waiting]
    if given.get("database") is None:
        given["database"] = app.settings.database
    interpreters.start()  # before the processes below are forked: they share them
    found: dict[str, Examination] = {}
    running: dict[Connection, _Examiner] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (processes or processors()):
                examiner = _Examiner(waiting.pop(0), given)
                running[examiner.results] = examiner
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                answer = running[ready].receive(watch)
                if answer is not None:
                    found[answer.consumer] = answer
                    running.pop(ready).process.join()
    finally:
        for (
            examiner
        ) in running.values():  # interrupted: they have the signal, too, and remove their databases
            examiner.process.join()
    return [found[name] for name in names]


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Examiner:
    """The process that verifies one consumer. It is forked, because consumers cannot be pickled."""

    def __init__(self, consumer: Consumer, given: Mapping[str, Any]) -> None:
        self.consumer = consumer.name
        if not any(self._start(consumer, given, limit) for limit in USABLE_WITHIN):
            raise Broken(UNUSABLE)

    def _start(self, consumer: Consumer, given: Mapping[str, Any], limit: float) -> bool:
        """Start the process; return whether it can use SQLite: its children would inherit a lock, too."""
        self.results, sender = multiprocessing.Pipe(duplex=False)
        context: Any = multiprocessing.get_context("fork")
        self.process = context.Process(target=_examine, args=(consumer, given, sender, limit))
        with fork_beside_threads():
            self.process.start()
        sender.close()
        try:
            self.results.recv()
        except EOFError:
            self.process.join()
            self.results.close()
            return False
        return True

    def receive(self, watch: Watch) -> Examination | None:
        """Take the next message; return it if it is the last."""
        try:
            message = self.results.recv()
        except EOFError:
            self.process.join()
            return Examination(self.consumer, problem=f"its process ended with {self.process.exitcode}")
        if isinstance(message, Examination):
            return message
        watch(self.consumer, *message)
        return None


def _examine(consumer: Consumer, given: Mapping[str, Any], sender: Connection, limit: float) -> None:
    use_sqlite_or_end(limit)
    sender.send(None)
    done = 0

    def progress(scenario: str, result: object) -> None:
        nonlocal done
        done += result is not None
        sender.send((scenario, done))

    try:
        sender.send(Examination(consumer.name, run(plan_of(consumer, given), progress)))
    except (ConfigurationError, OSError) as error:
        sender.send(Examination(consumer.name, problem=str(error)))
    except (Broken, Died, Hung) as error:
        sender.send(Examination(consumer.name, problem=f"verification failed to run: {error}"))
    except KeyboardInterrupt:
        return  # the parent reports it
    except Exception as error:  # noqa: BLE001  of the database's driver, most likely; the others go on
        sender.send(Examination(consumer.name, problem=text_of(error)))
