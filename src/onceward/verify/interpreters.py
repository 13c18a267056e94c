"""Other interpreters, which this process starts once and talks to in every verification."""

from __future__ import annotations

import ast
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import onceward
from onceward._files.sockets import place_for_sockets
from onceward.app.app import consumers_of
from onceward.inbox.evidence.modules import SCRIPT, syntax_tree
from onceward.transaction import Transaction
from onceward.verify.children import Died, value_of
from onceward.verify.interpreter import UNAVAILABLE, Journey, is_consumer
from onceward.verify.luggage import pack
from onceward.verify.plan import VerificationPlan
from onceward.verify.rows import schema
from onceward.verify.stage import Delivery
from onceward.verify.trial import NotChecked, SharedDatabase

HASH_SEEDS = (1, 2, 3)
"""Of the interpreters. In each of them, two strings in a set have another order with a chance of one half."""
_SENT = ("contract", "services", "build", "optional", "exclude", "outside", "reads", "allow", "timeout")
"""Arguments of a verification that matter there."""
_GUARD = re.compile(r"__name__ == '__main__'|'__main__' == __name__")
_PROGRAM = "onceward.verify.interpreter"
_running: dict[int, _Interpreter] = {}


class _Interpreter:
    """A process that waits for conversations. It ends when its standard input does: with this process."""

    def __init__(self, hash_seed: int) -> None:
        self.owner = os.getpid()
        self._folder = tempfile.TemporaryDirectory(prefix="onceward-", dir=place_for_sockets())
        self.address = str(Path(self._folder.name) / "socket")
        root = str(Path(onceward.__file__).parent.parent)
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, *["-O"] * sys.flags.optimize, "-m", _PROGRAM, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def start() -> None:
    """Start those that do not run yet. They take a moment, so start them before they are needed."""
    for seed in HASH_SEEDS:
        known = _running.get(seed)
        if known is None or (known.owner == os.getpid() and known.process.poll() is not None):
            _running[seed] = _Interpreter(seed)


class Conversation:
    """One instance of the consumer in another interpreter, on one database."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def deliver(self, event: Transaction) -> list[Delivery]:
        """Deliver an event until it is settled."""
        deliveries: list[Delivery] = self.ask(pickle.dumps(event))
        return deliveries

    def rows(self, found: list[schema.Table]) -> Any:
        """The rows, the tables, and outside calls that were made or stopped."""
        return self.ask(pickle.dumps(found))

    def ask(self, question: bytes) -> Any:
        try:
            self._connection.send_bytes(question)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise Died("its interpreter ended without an answer") from None
        if answer[0] == UNAVAILABLE:
            raise NotChecked(f"another interpreter cannot build it ({answer[1]})")
        return value_of(answer)


@contextmanager
def conversation(
    seed: int, plan: VerificationPlan, database: SharedDatabase, *, elsewhere: bool = False
) -> Iterator[Conversation]:
    """Import the consumer in another interpreter. Raises `NotChecked` if that is impossible."""
    journey = pickle.dumps(_journey(plan, database, elsewhere))
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(_running[seed].address)
        except OSError as error:
            raise NotChecked(f"another interpreter did not start ({error})") from None
        with Connection(os.dup(caller.fileno())) as connection:
            found = Conversation(connection)
            found.ask(journey)
            yield found


def _journey(plan: VerificationPlan, database: SharedDatabase, elsewhere: bool) -> Journey:
    consumer = plan.consumer
    home = consumer.__module__
    script = _script()
    if home == SCRIPT and not script:
        raise NotChecked(
            "it is defined in __main__, which another interpreter cannot import; put it into a module, or put what "
            'the script does under `if __name__ == "__main__":`'
        )
    given = {name: value for name, value in plan.given.items() if name in _SENT and value is not None}
    try:
        luggage = pack({**given, "events": list(plan.events)})
    except Exception as error:  # noqa: BLE001  user objects may raise anything
        raise NotChecked(f"its arguments cannot be sent to another interpreter ({error})") from None
    return Journey(
        script=script,
        modules=(home, *_who_know(consumer, home)),
        qualname=consumer.__qualname__,
        name=consumer.__name__,
        consumer_id=plan.contract.consumer_id,
        url=database.url,
        allow=tuple(plan.options.allow),
        timeout=plan.options.timeout,
        luggage=luggage,
        argv=tuple(sys.argv),
        path=tuple(sys.path),
        folder=str(Path.cwd()),
        environment=dict(os.environ),
        elsewhere=elsewhere,
    )


def _script() -> str:
    """The file of `__main__`, if importing it does nothing else; empty for a notebook, a command, and so on."""
    file = getattr(sys.modules[SCRIPT], "__file__", None)
    if not file or not file.endswith(".py") or getattr(sys.modules[SCRIPT], "__spec__", None) is not None:
        return ""
    tree = syntax_tree(Path(file).read_bytes())
    tests = [ast.unparse(each.test) for each in tree.body if isinstance(each, ast.If)] if tree else []
    return str(Path(file).absolute()) if any(_GUARD.fullmatch(each) for each in tests) else ""


def _who_know(consumer: Any, home: str) -> Iterator[str]:
    """The other modules that have its app, which makes a consumer of an imported function, and those of its package
    that have the consumer or its app: they may register something it uses."""
    known: Any = sys.modules.get(home)
    for part in consumer.__qualname__.split("."):
        known = getattr(known, part, None)
    apps = [
        app for app, each in consumers_of() if is_consumer(each, consumer.__name__, consumer.__qualname__)
    ]
    package = home.partition(".")[0]
    for name, module in list(sys.modules.items()):
        last = name.rpartition(".")[2]
        is_test = last.startswith("test_") or last.endswith("_test") or last == "conftest"
        things = [*apps, consumer, known] if name.partition(".")[0] == package else apps
        if name not in (home, SCRIPT) and not is_test and _has(module, things):
            yield name


def _has(module: object, things: list[Any]) -> bool:
    names = list(getattr(module, "__dict__", {}).values())  # sys.modules may hold anything
    return any(value is each for value in names for each in things if each is not None)
