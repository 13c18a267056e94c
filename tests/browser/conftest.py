"""A shop whose orders fail until somebody fixes them, with its console, and a browser."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text

from onceward.connectors import SqliteConnector
from onceward.transaction import Transaction
from tests.support.browser import browser as open_browser
from tests.support.processes import LoggedProcess
from tests.support.run.world import Run, Site
from tests.support.wait import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SHOP = """
from pathlib import Path
from onceward import Contract, ExceptionCategory, Onceward, TransactionException

app = Onceward("shop", database="sqlite:///shop.db")
contract = Contract(
    consumer_id="billing", event_types=["*"], owner_team="money", idempotency_mechanism="bill and dedup row", lease=5
)
POLICY = {"loop": {"empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}}}


@app.consumer("sqlite:///orders.db?lease=5", contract=contract, policy=POLICY)
def charge(order: dict, session) -> None:
    if "error" in order:
        raise TransactionException(order["error"], category=ExceptionCategory.BUSINESS)
    if "currency" not in order and not Path("fixed").exists():
        raise TransactionException(f"{order['id']} has no currency", category=ExceptionCategory.BUSINESS)
    session.execute("INSERT INTO bills (id) VALUES (:id)", {"id": order["id"]})
"""


class Shop(Site):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (directory / "shop.py").write_text(SHOP)
        self.engine = create_engine(f"sqlite:///{directory}/shop.db")
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE bills (id TEXT NOT NULL)"))

    def place(self, *orders: dict[str, Any], type: str = "order.placed", **metadata: Any) -> None:
        with SqliteConnector(self.directory / "orders.db") as queue:
            queue.dispatch_transactions(
                [
                    Transaction(id=order["id"], payload=order, metadata={"event_type": type, **metadata})
                    for order in orders
                ]
            )

    def fix(self) -> None:
        (self.directory / "fixed").touch()

    def bills(self) -> list[str]:
        with self.engine.connect() as connection:
            return list(connection.execute(text("SELECT id FROM bills")).scalars())

    def letters(self, status: str = "open") -> int:
        with self.engine.connect() as connection:
            counted = "SELECT count(*) FROM onceward_dead_letters WHERE status = :status"
            return int(connection.execute(text(counted), {"status": status}).scalar_one())

    def has_letters(self, number: int) -> bool:
        with self.engine.connect() as connection:
            found = connection.execute(
                text("SELECT count(*) FROM sqlite_master WHERE name = 'onceward_dead_letters'")
            ).scalar_one()
        return bool(found) and self.letters() == number

    @contextmanager
    def serve(self, *options: str, port: int = 0, **environ: str) -> Iterator[tuple[Run, str]]:
        """Workers and console in one command."""
        environ = {"ONCEWARD_SAMPLE_EVERY": "0.3", **environ}
        with self.run("--console", f"127.0.0.1:{port}", *options, **environ) as run:
            yield run, console_of(run)

    @contextmanager
    def console(self, *options: str) -> Iterator[str]:
        """The console alone."""
        log = self.directory / f"console-{time.monotonic_ns()}.log"
        command = [
            sys.executable,
            "-m",
            "onceward",
            "console",
            "shop:app",
            "--listen",
            "127.0.0.1:0",
            *options,
        ]
        process = LoggedProcess(command, log, cwd=self.directory, env=dict(os.environ))
        try:
            until(lambda: "The console is at" in process.log)
            yield process.log.partition(" is at ")[2].split("/ until")[0]
        finally:
            process.kill()


def console_of(run: Run) -> str:
    until(lambda: run.has_said("console at "))
    return next(
        str(line["message"]).split()[2].rstrip("/") for line in run.lines if "console at" in line["message"]
    )


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with open_browser() as made:
        yield made


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.engine.dispose()
