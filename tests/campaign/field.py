"""Where a campaign takes place: servers, files, and `onceward run` with its workers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.pool import NullPool

from onceward.connectors.urls import Address
from onceward.testing.servers import Server, redis_server
from onceward.transaction import Transaction
from tests.campaign import shop
from tests.support.own_postgres import OwnPostgres, own_postgres

CONSUMERS = ("charge", "ship")
SHOP = Path(__file__).with_name("shop.py")
RESTART_SECONDS = 60.0
"""How long a server may be away."""

T = TypeVar("T")


class Combination(NamedTuple):
    """What is attacked."""

    source: str
    database: str
    mode: str

    def __str__(self) -> str:
        return f"{self.source} → {self.database}, {self.mode}"


class Field:
    def __init__(
        self,
        what: Combination,
        directory: Path,
        processes: int,
        redis: Server | None,
        postgres: OwnPostgres | None,
    ) -> None:
        self.what = what
        self.directory = directory
        self.processes = processes
        self.redis = redis
        self.postgres = postgres
        settings = f"lease={shop.LEASE}&redelivery_delay=0.2"
        self.source = (
            f"sqlite:///{directory}/{{}}.db?{settings}"
            if redis is None
            else f"{redis.url}/{{}}?group=campaign&{settings}"
        )
        self.database = f"sqlite:///{directory}/inbox.db" if postgres is None else postgres.url
        self._run: subprocess.Popen[bytes] | None = None
        self._log = (directory / "run.log").open("wb")
        shutil.copy(SHOP, directory / "shop.py")

    # ── the run ─────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._run = subprocess.Popen(
            [sys.executable, "-m", "onceward", "run", "shop:app", "--processes", str(self.processes)],
            cwd=self.directory,
            env={
                **os.environ,
                "CAMPAIGN_MODE": self.what.mode,
                "CAMPAIGN_SOURCE": self.source,
                "CAMPAIGN_DATABASE": self.database,
            },
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def restart(self) -> None:
        self.start()

    def workers(self) -> list[int]:
        """Of the run, without those that have ended."""
        assert self._run is not None
        found: list[int] = []
        with suppress(OSError):
            for task in Path(f"/proc/{self._run.pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    def has_ended(self) -> bool:
        return self._run is not None and self._run.poll() is not None

    def kill_all(self) -> None:
        """Kill the supervisor and its workers at once, as when a machine dies."""
        assert self._run is not None
        with suppress(ProcessLookupError):
            os.killpg(self._run.pid, signal.SIGKILL)
        self._run.wait()

    def stop(self) -> int | None:
        """Stop the run as an operator does. Returns its exit code, None if it had to be killed."""
        assert self._run is not None
        self._run.terminate()
        try:
            return self._run.wait(60)
        except subprocess.TimeoutExpired:
            self.kill_all()
            return None

    # ── messages and results ────────────────────────────────────────────────────────────────────────────

    def send(self, consumer: str, messages: Sequence[Transaction]) -> None:
        """Send until the source has accepted all, as a producer does that got no answer."""

        def dispatch() -> None:
            with Address(self.source.format(consumer), sink=True).open(asynchronous=False) as sink:
                sink.dispatch_transactions(list(messages))

        persist(dispatch)

    def waiting(self, consumer: str) -> int:
        """How many messages are in the source or in flight."""
        return persist(lambda: Address(self.source.format(consumer)).counts().pending or 0)

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        engine = create_engine(self.database, poolclass=NullPool)
        try:
            yield engine
        finally:
            engine.dispose()

    def rows(self, sql: str) -> list[Any]:
        def select() -> list[Any]:
            with self.engine() as engine, engine.connect() as connection:
                return list(connection.execute(text(sql)))

        return persist(select)

    def prepare(self) -> None:
        with self.engine() as engine:
            if self.postgres is None:
                event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA journal_mode = WAL"))
            with engine.begin() as connection:
                connection.execute(text("CREATE TABLE charges (number TEXT)"))
        provider = create_engine(f"sqlite:///{self.directory}/provider.db", poolclass=NullPool)
        with provider.begin() as connection:
            connection.execute(text("PRAGMA journal_mode = WAL"))
            connection.execute(text("CREATE TABLE shipments (key TEXT PRIMARY KEY, number TEXT)"))

    def balance(self) -> tuple[int, str]:
        ended = subprocess.run(
            [sys.executable, "-m", "onceward", "balance", "shop:app"],
            cwd=self.directory,
            env={**os.environ, "CAMPAIGN_SOURCE": self.source, "CAMPAIGN_DATABASE": self.database},
            capture_output=True,
            text=True,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr

    def close(self) -> None:
        if self._run is not None and self._run.poll() is None:
            self.kill_all()
        self._log.close()


def persist(call: Callable[[], T]) -> T:
    """Repeat a call while a server is being restarted. What still fails after that is raised."""
    until = time.monotonic() + RESTART_SECONDS
    while True:
        try:
            return call()
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


@contextmanager
def field(what: Combination, processes: int) -> Iterator[Field]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onceward-campaign-")))
        redis = stack.enter_context(redis_server(durable=True)) if what.source == "redis" else None
        postgres = stack.enter_context(own_postgres()) if what.database == "postgresql" else None
        made = Field(what, directory, processes, redis, postgres)
        stack.callback(made.close)
        made.prepare()
        yield made
