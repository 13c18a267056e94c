"""`onceward run` as a real process in its own directory, and its output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from onceward.connectors import SqliteConnector
from onceward.transaction import Transaction
from tests.support.processes import LoggedProcess
from tests.support.wait import LIMIT, until

DEADLINE = 60.0
SHOP = Path(__file__).with_name("shop.py")
COMMAND = [sys.executable, "-m", "onceward", "run"]


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


class Run(LoggedProcess):
    """The command."""

    def __init__(self, site: Site, options: tuple[str, ...], environ: dict[str, str]) -> None:
        super().__init__(
            [*COMMAND, "shop:app", "--log-format", "json", *options],
            site.directory / f"run-{time.monotonic_ns()}.log",
            cwd=site.directory,
            env={**os.environ, **site.environ, **environ},
        )

    def says(self, text: str) -> bool:
        """Whether the log has it, or gets it before long: what a test sees elsewhere may come before the line."""
        give_up = time.monotonic() + LIMIT
        while not self.has_said(text) and time.monotonic() < give_up and self.process.poll() is None:
            time.sleep(0.05)
        return self.has_said(text)

    def has_said(self, text: str) -> bool:
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
        """The process ids of those that were started, in order."""
        marks = [line["message"] for line in self.lines if " started, pid" in line["message"]]
        return [int(message.rpartition(" ")[2]) for message in marks]

    def kill(self) -> None:
        """With all its workers: nothing outlives a test."""
        super().kill()
        for pid in self.workers():
            _kill(pid)

    # ── health ──────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def url(self) -> str:
        until(lambda: self.has_said("health at "))
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
