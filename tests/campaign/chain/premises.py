"""Where the chain runs: servers, databases, queues, and the processes of the three services."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.pool import NullPool

from onceward.connectors.urls import Address
from onceward.inbox import Inbox
from onceward.testing.servers import Server, redis_server
from onceward.transaction import Settlement, Transaction, Verdict
from tests.campaign.chain import services
from tests.campaign.field import persist
from tests.support.own_postgres import OwnPostgres, own_postgres

WIRES = ("redis", "postgresql", "sqlite")
DATABASES = ("orders", "charging", "shipping", "feed")
TABLES = {"orders": "orders", "charging": "charges", "shipping": "shipments"}
CODE = Path(__file__).parent
PAGE = 500
CONNECTIONS = 300
"""Of the server: nine workers have up to 20 each, and those of killed ones may not have ended yet."""


class Premises:
    """The three services on one wire: `redis` with databases on PostgreSQL, `postgresql` or `sqlite` for both."""

    def __init__(
        self, wire: str, directory: Path, processes: int, redis: Server | None, postgres: OwnPostgres | None
    ) -> None:
        self.what = wire
        self.directory = directory
        self.redis = redis
        self.postgres = postgres
        self.databases = {name: self._database(name) for name in DATABASES}
        settings = f"lease={services.LEASE}&redelivery_delay=0.2"
        self.queues = {
            "CHARGE": self._queue("charging", "charge", settings),
            "SHIP": self._queue("shipping", "ship", settings),
            "FEED": self._queue("feed", "feed", "lease=600"),
        }
        many = ["--processes", str(processes)]
        self._commands: dict[str, list[str]] = {
            "relay": ["-m", "onceward", "relay", "services:orders", *many],
            "charging": ["-m", "onceward", "run", "services:charging", *many],
            "shipping": ["-m", "onceward", "run", "services:shipping", *many],
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._log = (directory / "run.log").open("wb")
        for name in ("services.py", "desk.py"):
            shutil.copy(CODE / name, directory / name)

    def _database(self, name: str) -> str:
        if self.postgres is None:
            return f"sqlite:///{self.directory}/{name}.db"
        return self.postgres.url.replace("/postgres?", f"/{name}?", 1)

    def _queue(self, database: str, name: str, settings: str) -> str:
        if self.redis is not None:
            return f"{self.redis.url}/{name}?group=campaign&{settings}"
        if self.postgres is None:
            return f"{self.databases[database]}?queue={name}&{settings}"
        url = self.databases[database].replace("postgresql+psycopg://", "postgresql://", 1)
        return f"{url}&queue={name}&{settings}"

    @property
    def environment(self) -> dict[str, str]:
        urls = {name.upper(): url for name, url in self.databases.items() if name != "feed"} | self.queues
        return {**os.environ, **{f"CHAIN_{name}": url for name, url in urls.items()}}

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, customers: int, each: int, seconds: float) -> None:
        pause = seconds / max(customers * each, 1)
        self._commands["desk"] = ["desk.py", str(customers), str(each), f"{pause:.6f}"]
        if self.postgres is not None:
            server = create_engine(self.postgres.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
            with server.connect() as connection:
                for name in DATABASES:
                    connection.execute(text(f"CREATE DATABASE {name}"))
        serial = "INTEGER PRIMARY KEY" if self.postgres is None else "BIGINT GENERATED ALWAYS AS IDENTITY"
        for database, table in TABLES.items():
            with self.engine(database) as engine:
                Inbox(engine).migrate()
                with engine.begin() as connection:
                    connection.execute(
                        text(f"CREATE TABLE {table} (at {serial}, customer TEXT, number INTEGER)")
                    )

    def start(self) -> None:
        for name in self._commands:
            self._start(name)

    def _start(self, name: str) -> None:
        self._running[name] = subprocess.Popen(
            [sys.executable, *self._commands[name]],
            cwd=self.directory,
            env=self.environment,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def workers(self) -> list[int]:
        """Processes that can be killed alone: the workers of the services, and the order desk as long as it places."""
        found: list[int] = []
        for name, process in self._running.items():
            if name == "desk":
                if process.poll() is None:
                    found.append(process.pid)
                elif process.returncode < 0:
                    self._start("desk")
                continue
            with suppress(OSError):
                for task in Path(f"/proc/{process.pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return found

    def keep_desk(self) -> bool:
        """Start the desk again if it was killed. Returns whether it has placed all orders."""
        desk = self._running["desk"]
        if desk.poll() not in (None, 0):
            self._start("desk")
        return desk.poll() == 0

    def has_ended(self) -> bool:
        return any(process.poll() is not None for name, process in self._running.items() if name != "desk")

    def kill_all(self) -> None:
        """Kill one whole service, or all of them, as when a machine dies."""
        names = list(self._running)
        for name in random.choice([*([each] for each in names), names]):
            self._kill(name)

    def restart(self) -> None:
        for name, process in list(self._running.items()):
            if process.poll() is not None and not (name == "desk" and process.returncode == 0):
                self._start(name)

    def _kill(self, name: str) -> None:
        process = self._running[name]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> list[int | None]:
        """Stop the services as an operator does. Returns their exit codes, None for one that had to be killed."""
        codes: list[int | None] = []
        for process in self._running.values():
            process.terminate()
        for name, process in self._running.items():
            try:
                code: int | None = process.wait(60)
            except subprocess.TimeoutExpired:
                self._kill(name)
                code = None
            if name != "desk":
                codes.append(code)
        return codes

    def close(self) -> None:
        for name, process in self._running.items():
            if process.poll() is None:
                self._kill(name)
        self._log.close()

    # ── what they left ──────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def engine(self, database: str) -> Iterator[Engine]:
        engine = create_engine(self.databases[database], poolclass=NullPool)
        if self.postgres is None:
            event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA journal_mode = WAL"))
        try:
            yield engine
        finally:
            engine.dispose()

    def rows(self, database: str, sql: str) -> list[Any]:
        def select() -> list[Any]:
            with self.engine(database) as engine, engine.connect() as connection:
                return list(connection.execute(text(sql)))

        return persist(select)

    def read_feed(self) -> list[Transaction]:
        """Take all that was published to the feed, in the order in which it arrived."""
        found: list[Transaction] = []
        with Address(self.queues["FEED"]).open(asynchronous=False) as feed:
            while page := feed.fetch_transactions(PAGE):
                found += page
                feed.settle_transactions([Settlement(each, Verdict.DONE) for each in page])
        return found

    def balance(self, app: str) -> tuple[int, str]:
        ended = subprocess.run(
            [sys.executable, "-m", "onceward", "balance", f"services:{app}"],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr


@contextmanager
def premises(wire: str, processes: int) -> Iterator[Premises]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onceward-chain-")))
        redis = stack.enter_context(redis_server(durable=True)) if wire == "redis" else None
        postgres = stack.enter_context(own_postgres()) if wire != "sqlite" else None
        if postgres is not None:
            postgres.allow(CONNECTIONS)
        made = Premises(wire, directory, processes, redis, postgres)
        stack.callback(made.close)
        yield made
