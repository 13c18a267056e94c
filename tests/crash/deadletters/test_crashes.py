"""Killed while burying, redriving or processing a redriven letter: nothing is lost, and nothing happens twice."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import NullPool, create_engine, text

from onceward import Transaction
from onceward.connectors import SqliteConnector
from onceward.deadletters import Category, DeadLetter, DeadLetters, Status
from onceward.inbox import Inbox
from tests.crash.deadletters import worker
from tests.crash.deadletters.worker import CONTRACT, Orders

PATIENCE = 60.0

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload([worker.__name__])


class Site:
    def __init__(self, folder: Path, url: str, connect_args: dict[str, Any]) -> None:
        self.folder = folder
        self.orders = Orders(folder, url, connect_args)
        self.engine = create_engine(url, connect_args=connect_args, poolclass=NullPool)
        self.letters = DeadLetters(self.engine)
        self.letters.migrate()
        Inbox(self.engine).register(CONTRACT)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE bills (id text)"))
        self.queue = SqliteConnector(folder / "queue.db")

    def send(self, *ids: str) -> None:
        metadata = {"event_type": "order.paid"}
        self.queue.dispatch_transactions([Transaction(id=id_, payload={}, metadata=metadata) for id_ in ids])

    def run(self, function: Callable[[Orders], None], point: str = "", *, fixed: bool = False) -> None:
        """Run a worker to its end; with a point, check that it was killed there."""
        process = _forking.Process(target=function, args=(self.orders._replace(point=point, fixed=fixed),))
        process.start()
        process.join(PATIENCE)
        code = process.exitcode
        process.kill()
        process.close()
        assert code == (-signal.SIGKILL if point else 0)

    def until(self, condition: Callable[[], bool]) -> None:
        """Run healthy workers, one after another, as leases expire."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "the letters were never settled"
            self.run(worker.consume, fixed=True)

    def letter(self, message_id: str = "bad") -> DeadLetter:
        (found,) = (each for each in self.letters.find() if each.message_id == message_id)
        return found

    def is_resolved(self) -> bool:
        return all(letter.status is Status.RESOLVED for letter in self.letters.find())

    def bills(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(text("SELECT id FROM bills")).scalars())

    def count(self, table: str) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text(f"SELECT count(*) FROM onceward_{table}")).scalar_one())


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "sqlite":
        made = Site(tmp_path, f"sqlite:///{tmp_path}/business.db", {"timeout": 30.0})
        yield made
        made.queue.close()
        return
    url = request.getfixturevalue("postgres_url")
    schema = f"letters_{uuid4().hex}"
    admin = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with admin.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    made = Site(tmp_path, url, {"options": f"-csearch_path={schema}"})
    yield made
    made.queue.close()
    with admin.connect() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))


@pytest.mark.req("CC-050")
@pytest.mark.parametrize("point", ["burying", "buried"])
def test_killed_while_burying(site: Site, point: str) -> None:
    """It is in the store before its source forgets it, and there only once, however often it is reported."""
    site.send("bad", "good")
    site.run(worker.consume, point)
    assert len(site.letters.find()) == (point == "buried")
    assert site.queue.counts()["dead"] == 1
    site.run(worker.consume)
    letter = site.letter()
    assert (letter.attempts, letter.deaths, len(letter.history)) == (1, 1, 1)
    assert site.queue.counts()["dead"] == 0
    assert site.letters.count() == 1


@pytest.mark.req("CC-052")
def test_killed_in_the_middle_of_a_redrive(site: Site) -> None:
    site.send(*(f"bad-{number}" for number in range(5)))
    site.run(worker.consume)
    site.run(worker.redrive, "scheduling")
    assert {letter.status for letter in site.letters.find()} == {Status.OPEN}
    assert [site.count(table) for table in ("rcas", "redrives", "audit")] == [0, 0, 0]
    for _ in range(2):
        site.run(worker.redrive)
    assert [site.count(table) for table in ("rcas", "redrives", "audit")] == [1, 1, 1]
    assert {letter.redrives for letter in site.letters.find()} == {1}
    assert site.letters.verify_audit().broken is None
    site.until(site.is_resolved)
    assert site.bills() == [f"bad-{number}" for number in range(5)]


@pytest.mark.req("CC-052", "CC-050")
@pytest.mark.parametrize("point", ["handling", "settling", "settled"])
def test_killed_with_a_redriven_letter_in_hand(site: Site, point: str) -> None:
    site.send("bad")
    site.run(worker.consume)
    site.run(worker.redrive)
    site.run(worker.consume, point, fixed=True)
    assert site.bills() == ([] if point == "handling" else ["bad"])
    assert site.letter().status is (Status.RESOLVED if point == "settled" else Status.REDRIVEN)
    site.until(site.is_resolved)
    assert site.bills() == ["bad"]
    letter = site.letter()
    assert letter.attempts == len(letter.history) == (1 if point == "settled" else 2), (
        "the lost delivery counts"
    )
    assert site.letters.rcas()[0]["closed_at"] is not None


@pytest.mark.req("CC-050")
def test_a_redriven_letter_that_kills_its_process_ends_as_poison(site: Site) -> None:
    site.send("bad", "bad-too")
    site.run(worker.consume)
    site.run(worker.redrive)
    deaths = 0
    deadline = time.monotonic() + PATIENCE
    while {letter.category for letter in site.letters.find()} != {Category.POISON}:
        assert time.monotonic() < deadline
        process = _forking.Process(
            target=worker.consume, args=(site.orders._replace(point="handling", fixed=True),)
        )
        process.start()
        process.join(PATIENCE)
        deaths += process.exitcode == -signal.SIGKILL
        process.close()
        time.sleep(0.05)
    assert deaths <= 6, "three for each"
    assert site.bills() == []
    assert {letter.status for letter in site.letters.find()} == {Status.OPEN}
    site.send("good")
    site.until(lambda: site.bills() == ["good"])
