"""An interpreter of its own for verifications: `python -m onceward.verify.interpreter FILE_NUMBER`.

It has other hash values than the process that started it. It imports what the kit needs, waits at a socket, and forks
for every conversation; only there the consumer's modules are imported, so everything that an import computes is new.
It ends with the process that started it.
"""

from __future__ import annotations

import gc
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import msgspec
from sqlalchemy import URL

from onceward.app.app import consumers_of
from onceward.app.consumer import Consumer
from onceward.errors import ConfigurationError
from onceward.inbox.evidence.modules import SCRIPT
from onceward.task.lifecycle import text_of
from onceward.transaction import Transaction
from onceward.verify.children import PREPARING, Watchdog, detach_from_parent, preload, watch
from onceward.verify.databases import preload_driver
from onceward.verify.elsewhere import go_elsewhere
from onceward.verify.plan import VerificationPlan, plan_of
from onceward.verify.rows import schema
from onceward.verify.stage import Stage
from onceward.verify.watch import blockade, intrusions

SPAWNED = "__mp_main__"
DONE = "done"
UNAVAILABLE = "unavailable"


class Journey(msgspec.Struct, frozen=True):
    """Where a conversation takes place, in plain data; the rest is unpacked there."""

    modules: tuple[str, ...]
    """To import, the consumer's own first."""
    script: str
    """The file that runs as `__main__`, if code in it matters."""
    qualname: str
    name: str
    consumer_id: str
    url: URL
    allow: tuple[str, ...]
    timeout: float
    luggage: bytes
    """The arguments of the verification."""
    argv: tuple[str, ...]
    path: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    elsewhere: bool
    """Whether it is later there, and on another host."""


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        preload()
        preload_driver(URL.create("sqlite"), asynchronous=False)
        gc.freeze()  # all of it stays: neither a fork nor the end of this process looks through it
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if listener not in ready:
                return  # its owner has ended
            conversation, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _converse(Connection(conversation.detach()))
            conversation.close()


def _converse(answers: Connection) -> None:
    """Answer until the other side hangs up."""
    try:
        with suppress(EOFError, BrokenPipeError):
            _answer_all(answers)
    finally:
        os._exit(0)


def _answer_all(answers: Connection) -> None:
    journey: Journey = pickle.loads(answers.recv_bytes())
    watchdog = Watchdog(answers.send, journey.timeout, tempfile.TemporaryFile("w+"))  # noqa: SIM115
    _arrive(journey)
    watchdog.start()
    watchdog.pet(f"the import of {journey.modules[0]}", PREPARING)
    try:
        blockade.install(journey.url, journey.allow, [])
        stage = Stage(_plan(journey), journey.url, watchdog)
        task = stage.instance()
    except BaseException as error:  # noqa: BLE001  an import may raise anything, also SystemExit
        answers.send((UNAVAILABLE, text_of(error)))
        return
    answers.send((DONE, None))
    while True:
        watchdog.pet("waiting for the next event", 10 * PREPARING)
        question = pickle.loads(answers.recv_bytes())
        try:
            answer = (DONE, _answer(stage, task, question))
        except BaseException:  # noqa: BLE001  reported to the other side
            answer = ("broken", traceback.format_exc())
        answers.send(answer)


def _answer(stage: Stage, task: Any, question: Transaction | list[schema.Table]) -> Any:
    """Deliver an event, or read the rows of tables."""
    if isinstance(question, Transaction):
        stage.expire_leases()
        return stage.settle(task, question)
    stage.watchdog.pet("reading the database", PREPARING)
    return stage.rows(question), question, intrusions.seen, blockade.seen


def _arrive(journey: Journey) -> None:
    """Be where the verification is."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(journey.environment)
    os.chdir(journey.folder)
    sys.argv[:] = journey.argv
    sys.path[:] = journey.path
    if journey.elsewhere:
        go_elsewhere()
    detach_from_parent()
    watch()


def _plan(journey: Journey) -> VerificationPlan:
    if journey.script:
        _load_script(journey.script)
    modules = [import_module(name) for name in journey.modules]
    plan = plan_of(_find(journey, modules), pickle.loads(journey.luggage))
    if plan.contract.consumer_id != journey.consumer_id:
        raise ConfigurationError(f"{journey.qualname} is another consumer there")
    intrusions.claim_package(journey.modules[0])
    intrusions.blame(plan.consumer)
    return plan


def _load_script(path: str) -> None:
    """Run a script as multiprocessing does: not as `__main__`, but found under that name afterwards."""
    module = ModuleType(SPAWNED)
    sys.modules[SCRIPT] = sys.modules[SPAWNED] = module
    vars(module).update(runpy.run_path(path, run_name=SPAWNED))


def is_consumer(consumer: Consumer, name: str, qualname: str) -> bool:
    """Whether this consumer of an app has these names, its own and its function's."""
    return consumer.name == name and consumer.function.__qualname__ == qualname


def _find(journey: Journey, modules: list[Any]) -> Any:
    """The consumer by its name in its module, or else among those of all apps."""
    found: Any = modules[0]
    for part in journey.qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        return found
    alike = [each for _, each in consumers_of() if is_consumer(each, journey.name, journey.qualname)]
    if alike:  # other apps may have a consumer of the same name
        return max(
            alike,
            key=lambda each: (
                each.contract is not None and each.contract.consumer_id == journey.consumer_id,
                each.function.__module__ == journey.modules[0],
            ),
        )
    if found is None:
        raise ConfigurationError(f"{journey.modules[0]} has no {journey.qualname} when it is imported again")
    return found


if __name__ == "__main__":
    main()
