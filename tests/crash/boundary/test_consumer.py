"""Consumers and the boundary die at the worst moment: every fact takes effect once, and none is lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from onceward.boundary import BoundaryClient, envelope_for, fact_of
from onceward.boundary.errors import Unavailable
from tests.crash.boundary.consumer_process import FATAL, POINTS, STRATEGIES, Doomed, run
from tests.support import ROOT

CONSUMER = Path(__file__).with_name("consumer_process.py")
SERVER = "tests.support.boundary.consumer_server"
COUNT = 8


class Server:
    """A boundary in another process, always at the same address."""

    def __init__(self, directory: Path) -> None:
        self._arguments = [str(directory / "boundary"), str(directory / "connections")]
        self.start()
        self._arguments.append(self.url.rpartition(":")[2])

    def start(self) -> None:
        command = [sys.executable, "-m", SERVER, *self._arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.kill()


@pytest.fixture(params=["threads", "asyncio"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def append(server: Server) -> None:
    with BoundaryClient(server.url) as client:
        for number in range(1, COUNT + 1):
            envelope = envelope_for(f"message-{number}", from_zone="a", to_zone="b")
            client.append(envelope, fact_of(f"batch:B{number}", "completed", {}))


def new_database(path: Path) -> Path:
    """Its table allows duplicates, to make them visible."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE effects (at_offset INTEGER)")
    return path


def effects(database: Path) -> list[int]:
    with closing(sqlite3.connect(database)) as connection:
        return [at for (at,) in connection.execute("SELECT at_offset FROM effects ORDER BY at_offset")]


def cursor(server: Server, name: str) -> int:
    """The position of the cursor, from outside: that of the next fact, minus one."""
    with BoundaryClient(server.url) as client:
        facts = client.fetch(name, 1).facts
        return facts[0].offset - 1 if facts else COUNT


@pytest.mark.req("BC-06")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_consumer_killed_at_any_point_loses_no_outcome_and_doubles_none(
    server: Server, tmp_path: Path, mode: str, strategy: str
) -> None:
    append(server)
    databases = [new_database(tmp_path / f"{number}.db") for number in range(len(POINTS))]
    command = [sys.executable, str(CONSUMER), mode, strategy, server.url, str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    assert ended.stdout.split() == [str(-signal.SIGKILL)] * len(POINTS)
    for number, (point, (durable, confirmed)) in enumerate(POINTS.items()):
        name, database = f"consumer-{number}", databases[number]
        assert effects(database) == list(range(1, durable + 1)), point
        assert cursor(server, name) == confirmed, point
        run(mode, Doomed("nowhere"), strategy, server.url, name, str(database))
        assert effects(database) == list(range(1, COUNT + 1)), point
        assert cursor(server, name) == COUNT, point


@pytest.mark.req("BC-06")
def test_a_boundary_killed_while_a_batch_is_applied_has_it_come_again_without_a_second_effect(
    server: Server, tmp_path: Path, mode: str
) -> None:
    append(server)
    where = ("once per id", server.url, "consumer", str(new_database(tmp_path / "effects.db")))

    class Killing(Doomed):
        def pass_by(self, point: str, offset: int) -> None:
            if (point, offset) == ("before apply", FATAL):
                os.kill(server.process.pid, signal.SIGKILL)
                server.process.wait(60)

    with pytest.raises(Unavailable) as caught:
        run(mode, Killing("nowhere"), *where)
    assert "confirming offset 6" in caught.value.__notes__[0]
    assert effects(Path(where[-1])) == [1, 2, 3, 4, 5, 6]
    server.kill()
    server.start()
    assert cursor(server, "consumer") == 3, "confirms survive"
    run(mode, Doomed("nowhere"), *where)
    assert effects(Path(where[-1])) == list(range(1, COUNT + 1))
    assert cursor(server, "consumer") == COUNT
