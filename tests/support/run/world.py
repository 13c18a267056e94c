"""`onceward run` as a real process in its own directory, and its output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from onceward.connectors import SqliteConnector
from onceward.transaction import Transaction

DEADLINE = 60.0
SHOP = Path(__file__).with_name("shop.py")
COMMAND = [sys.executable, "-m", "onceward", "run"]


def wait_until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.02)


class Site:
    """A directory that contains the app of `shop.py`."""

    def __init__(self, directory: Path, mode: str = "threads") -> None:
        self.directory = directory
        self.mode = mode
        self.environ: dict[str, str] = {"RUN_MODE": mode}
        shutil.copy(SHOP, directory / "shop.py")

    def send(self, *orders: dict[str, Any]) -> None:
        with self.queue() as queue:
            queue.dispatch_transactions([Transaction(payload=order) for order in orders])

    def queue(self, **settings: Any) -> SqliteConnector:
        return SqliteConnector(self.directory / "orders.db", **settings)

    def counts(self) -> dict[str, int]:
        with self.queue() as queue:
            return queue.counts()

    def lines(self, file: str) -> list[str]:
        path = self.directory / file
        return path.read_text().split() if path.exists() else []

    @property
    def done(self) -> list[str]:
        return self.lines("done.txt")

    @property
    def begun(self) -> list[str]:
        return self.lines("begun.txt")

    @contextmanager
    def run(self, *options: str, **environ: str) -> Iterator[Run]:
        made = Run(self, options, environ)
        try:
            yield made
        finally:
            made.kill()


class Run:
    """The command, and its log so far."""

    def __init__(self, site: Site, options: tuple[str, ...], environ: dict[str, str]) -> None:
        self._log_file = site.directory / f"run-{time.monotonic_ns()}.log"
        with self._log_file.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "shop:app", "--log-format", "json", *options],
                stdout=log,
                stderr=log,
                cwd=site.directory,
                env={**os.environ, **site.environ, **environ},
            )

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines()]

    def says(self, text: str) -> bool:
        return text in self.log

    def signal(self, *signals: signal.Signals) -> None:
        for each in signals:
            self.process.send_signal(each)

    def signal_worker(self, number: signal.Signals) -> None:
        """The newest line."""
        os.kill(self.workers()[-1], number)

    def ended(self) -> int:
        """The exit code, after it has ended."""
        return self.process.wait(DEADLINE)

    def workers(self) -> list[int]:
        """The process ids of the workers, in the order they were started."""
        marks = [line["message"] for line in self.lines if "has started, pid" in line["message"]]
        return [int(message.rpartition(" ")[2]) for message in marks]

    def kill(self) -> None:
        """Kill it with all its workers: nothing outlives a test."""
        self.process.kill()
        self.process.wait()
        for pid in self.workers():
            _kill(pid)

    # ── health ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def url(self) -> str:
        wait_until(lambda: self.says("health at "))
        line = next(line["message"] for line in self.lines if "health at" in line["message"])
        return str(line.split()[2].removesuffix("/livez,"))

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urlopen(f"{self.url}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def consumer(self) -> dict[str, Any]:
        """What the first worker reports about its consumer."""
        [first, *_] = json.loads(self.get("/progress")[1])["workers"]
        return {} if not first["consumers"] else dict(first["consumers"][0])

    def is_ready(self) -> bool:
        return self.get("/readyz")[0] == 200


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
