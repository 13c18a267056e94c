"""An app whose handlers call a provider over HTTP, in as many processes as a test wants, and that provider."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from onceward.connectors import SqliteConnector
from onceward.transaction import Transaction
from tests.support.commands import onceward
from tests.support.run.world import Run, Site

SHOP = """
import os
from urllib.request import urlopen

from onceward import Contract, Onceward, Refuse

app = Onceward("shop", database=os.environ["SHOP_DATABASE"], dependencies=["payments"])
CONTRACT = Contract(
    consumer_id="billing", event_types=["*"], owner_team="tests", idempotency_mechanism="record and row together"
)


@app.consumer(
    os.environ.get("RUN_SOURCE", "sqlite:///orders.db"), name="charge", contract=CONTRACT, depends_on=["payments"]
)
def charge(order: dict, session) -> None:
    if order["number"] == 7:
        raise Refuse("no such card")
    with urlopen(os.environ["PROVIDER"], timeout=30) as answer:
        answer.read()
    session.execute("INSERT INTO charges (number) VALUES (:number)", {"number": order["number"]})


@app.consumer("sqlite:///letters.db", name="greet", contract=None)
def greet(letter: dict) -> None:
    with open("greeted.txt", "a") as lines:
        lines.write("x\\n")
"""


class Provider:
    """A server that can be down."""

    def __init__(self) -> None:
        self.down = False
        self.refused: list[float] = []
        """When it was called while it was down."""
        self.served: list[float] = []
        self._lock = Lock()

    def answer(self) -> int:
        with self._lock:
            (self.refused if self.down else self.served).append(time.monotonic())
            return 503 if self.down else 200


@contextmanager
def provider() -> Iterator[tuple[Provider, str]]:
    state = Provider()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(state.answer())
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 256

    with Server(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield state, f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class ShopSite(Site):
    """A directory with the app, and its database."""

    def __init__(self, directory: Path, provider: str, database: str) -> None:
        self.directory = directory
        self.environ = {"PROVIDER": provider, "SHOP_DATABASE": database}
        self.database = database
        (directory / "shop.py").write_text(SHOP)
        from sqlalchemy import create_engine, text

        self.engine = create_engine(database)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE charges (number INTEGER)"))

    def order(self, numbers: range) -> None:
        with SqliteConnector(self.directory / "orders.db") as queue:
            queue.dispatch_transactions([Transaction(payload={"number": number}) for number in numbers])

    def charged(self) -> list[int]:
        return self.ask("SELECT number FROM charges ORDER BY number")

    def dead(self) -> int:
        [count] = self.ask("SELECT count(*) FROM onceward_dead_letters")
        return count

    def ask(self, query: str) -> list[Any]:
        from sqlalchemy import text

        with self.engine.connect() as connection:
            return list(connection.execute(text(query)).scalars())

    def command(self, *arguments: str) -> tuple[int, str]:
        environment = {**os.environ, **self.environ, "PYTHONPATH": str(self.directory)}
        done = onceward(*arguments, "--database", self.database, cwd=self.directory, env=environment)
        return done.returncode, done.stdout + done.stderr


def warnings_of(run: Run) -> list[str]:
    """What its workers logged about holds."""
    return [line["message"] for line in run.lines if line.get("logger") == "onceward.failures"]
