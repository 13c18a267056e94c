"""Consumers of a boundary are killed in the middle of their batches: every fact takes effect once, and none is lost."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from typing import Any

import pytest
from sqlalchemy import create_engine

from onceward import Transaction
from onceward.boundary import BoundaryClient
from onceward.connectors.boundary import BoundaryConnector
from onceward.inbox import Inbox
from tests.crash.connectors import boundary_worker as worker
from tests.crash.connectors.boundary_worker import CONTRACT, RECEIVER, REFUSED, Orders
from tests.support.boundary import server
from tests.support.fork_server import FORKED
from tests.support.wait import until

FACTS = 60
PATIENCE = 60.0


class BillingDesk:
    def __init__(self, url: str, database: Path, asynchronous: bool) -> None:
        self.url = url
        self.database = database
        self.asynchronous = asynchronous
        engine = create_engine(f"sqlite:///{database}")
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE bills (id TEXT, number INTEGER)")
        inbox = Inbox(engine)
        inbox.migrate()
        inbox.register(CONTRACT)
        engine.dispose()

    def append(self, *numbers: int) -> None:
        facts = [
            Transaction(
                f"m{number}", {"subject": "batch:one", "predicate": "made", "object": {"number": number}}
            )
            for number in numbers
        ]
        with BoundaryClient(self.url) as client:
            BoundaryConnector(client, from_zone="plant-a", to_zone="hq").dispatch_transactions(facts)

    def start(self, **orders: Any) -> Any:
        reported = Orders(self.url, str(self.database), self.asynchronous, **orders)
        process = FORKED.Process(target=worker.run, args=(reported,))
        process.start()
        return process

    def ends(self, **orders: Any) -> int:
        """Its exit code."""
        process = self.start(**orders)
        process.join(PATIENCE)
        assert process.exitcode is not None
        return int(process.exitcode)

    def drain(self, last: int, **orders: Any) -> None:
        """Consume until the cursor is there."""

        def is_there() -> bool:
            if self.cursor() >= last:
                return True
            assert self.ends(**orders) == 0
            return False

        until(is_there)

    def query(self, query: str) -> list[Any]:
        with closing(connect(self.database)) as connection:
            return connection.execute(query).fetchall()

    def effects(self) -> Counter[int]:
        return Counter(number for (number,) in self.query("SELECT number FROM bills"))

    def cursor(self) -> int:
        with urllib.request.urlopen(f"{self.url}/stats") as answer:
            consumers = json.load(answer)["consumers"]
        return next((each["offset"] for each in consumers if each["name"] == RECEIVER), 0)


@pytest.fixture(params=["threads", "asyncio"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BillingDesk]:
    with server.boundary_process(tmp_path / "boundary") as url:
        yield BillingDesk(url, tmp_path / "billing.db", request.param == "asyncio")


@pytest.mark.usual("handler", "confirm")
@pytest.mark.req("BC-27")
@pytest.mark.parametrize("point", ["handler", "settle", "confirm", "confirmed"])
def test_a_consumer_killed_in_the_midst_of_a_batch_loses_nothing_and_doubles_nothing(
    site: BillingDesk, point: str
) -> None:
    """In the handler before its commit, after commits before they are settled, before and after the cursor moves. In
    the handler it dies in its third batch: one commit may decide a whole batch."""
    site.append(*range(1, FACTS + 1))
    assert site.ends(point=point, after=27 if point == "handler" else 0) == -signal.SIGKILL
    done = site.effects()
    assert max(done.values()) == 1
    assert done.keys() >= set(range(1, site.cursor() + 1)), "confirmed before it was done"
    site.drain(FACTS)
    assert site.effects() == Counter(range(1, FACTS + 1))


@pytest.mark.req("BC-27")
def test_consumers_killed_again_and_again_while_facts_come_in(site: BillingDesk) -> None:
    """Two with one name at a time, which see the same facts."""
    site.append(*range(1, 31))
    workers = [site.start(), site.start()]
    for number in range(31, 91, 10):
        site.append(*range(number, number + 10))
        workers.pop(0).kill()
        workers.append(site.start())
    for each in workers:
        each.join(PATIENCE)
    site.drain(90)
    assert site.effects() == Counter(range(1, 91))


@pytest.mark.req("BC-20")
def test_a_consumer_killed_between_burying_and_confirming_makes_one_letter(site: BillingDesk) -> None:
    site.append(*range(1, 21))
    assert site.ends(point="buried", after=0, letters=True) == -signal.SIGKILL
    assert site.query("SELECT message_id, deaths FROM onceward_dead_letters") == [(f"m{REFUSED}", 1)]
    assert site.cursor() < REFUSED, "the cursor had passed it already"
    site.drain(20, letters=True)
    assert site.query("SELECT message_id, status FROM onceward_dead_letters") == [(f"m{REFUSED}", "open")]
    assert site.effects() == Counter(set(range(1, 21)) - {REFUSED})
