"""Limits of several processes that are killed, stopped and watched."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from onceward.limits.limiter import LATE
from onceward.limits.records import AHEAD, LEASE
from tests.support.run.world import Run, Site
from tests.support.schema import new_schema
from tests.support.wait import until

SHOP = """
import json
import os
import time

from onceward import Limit, Onceward

app = Onceward("shop", database=os.environ["SHOP_DATABASE"])
log = os.open("log.txt", os.O_APPEND | os.O_CREAT | os.O_WRONLY)


def note(what, order):
    line = json.dumps([what, order["number"], order.get("customer"), os.getpid(), time.monotonic()])
    os.write(log, f"{line}\\n".encode())


@app.consumer("sqlite:///orders.db", name="charge", contract=None, limit=Limit(**json.loads(os.environ["LIMIT"])))
def charge(order: dict) -> None:
    note("begin", order)
    time.sleep(order.get("seconds", 0))
    note("end", order)
"""


class LimitedSite(Site):
    def __init__(self, directory: Path, database: str, **limit: Any) -> None:
        self.directory = directory
        self.environ = {"SHOP_DATABASE": database, "LIMIT": json.dumps(limit)}
        self.engine = create_engine(database)
        (directory / "shop.py").write_text(SHOP)

    def log(self, what: str) -> list[list[Any]]:
        path = self.directory / "log.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [each for each in map(json.loads, lines) if each[0] == what]

    def most_at_once(self, killed: set[int], until_then: float) -> int:
        """How many handlers ran at once. Those of killed processes ended then."""
        ends = {(number, pid): at for _, number, _, pid, at in self.log("end")}
        events = []
        for _, number, _, pid, at in self.log("begin"):
            end = ends.get((number, pid), until_then if pid in killed else float("inf"))
            events += [(at, 1), (end, -1)]
        now = most = 0
        for _, change in sorted(events):
            now += change
            most = max(most, now)
        return most

    def slots(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM onceward_limit_slots")).scalar_one())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LimitedSite]:
    made = LimitedSite(tmp_path, f"sqlite:///{tmp_path}/shop.db", concurrency=2)
    yield made
    made.engine.dispose()


@pytest.mark.req("LI-01", "LI-07", "LI-08")
def test_two_processes_keep_one_rate(postgres_url: str, tmp_path: Path) -> None:
    with new_schema(postgres_url) as schema:
        url = schema.plain_url.replace("postgresql://", "postgresql+psycopg://", 1)
        site = LimitedSite(tmp_path, url, rate="20/s")
        site.send(*({"number": number} for number in range(1000)))
        with site.run("--health", "127.0.0.1:0", "--processes", "2") as run:
            until(lambda: len(site.log("begin")) >= 100)
            metrics = run.get("/metrics")[1]
            waiting = [
                line for line in metrics.splitlines() if line.startswith("onceward_consumer_limit_waiting{")
            ]
            assert len(waiting) == 2
            assert sum(float(line.rpartition(" ")[2]) for line in waiting) > 0
            assert "onceward_consumer_limit_wait_seconds{" in metrics
            assert 'limit_waiting{consumer="outbox-relay"' not in metrics
            run.signal(signal.SIGTERM)
            assert run.ended() == 0
        times = sorted(each[-1] for each in site.log("begin"))
        for first, begin in enumerate(times):  # in any time, whatever its length
            for last, end in enumerate(times[first:]):
                assert last <= 20 * (end - begin + AHEAD + LATE)
        assert len(times) - 1 <= 20 * (times[-1] - times[0] + LATE) + 1
        site.engine.dispose()
    counts = site.counts()
    assert counts["ready"] + counts["delayed"] == 1000 - len(times), "what waited was given back"
    assert counts["dead"] == 0


@pytest.mark.req("LI-03")
def test_the_slots_of_a_killed_worker_are_free_at_once(site: LimitedSite) -> None:
    with site.run("--processes", "2") as run:
        site.send({"number": 1, "seconds": 3600}, {"number": 2, "seconds": 3600})
        until(lambda: len(site.log("begin")) == 2)
        site.send(*({"number": number} for number in range(3, 10)))
        time.sleep(0.5)
        assert len(site.log("begin")) == 2, "both slots are taken"
        killed = {each[3] for each in site.log("begin")}
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        at = time.monotonic()
        until(
            lambda: {each[1] for each in site.log("end")} == set(range(3, 10)) or len(site.log("begin")) >= 4
        )
        assert site.most_at_once(killed, at) <= 2
        run.kill()


@pytest.mark.req("LI-03")
def test_a_slot_of_a_killed_process_returns_within_one_lease(site: LimitedSite) -> None:
    with site.run() as one, site.run() as other:
        survivor, _, at = silence(site, one, other, signal.SIGKILL)
        until(lambda: [each for each in site.log("end") if each[1] == 3], seconds=LEASE + 60)
        check_return(site, survivor, at)


@pytest.mark.long
@pytest.mark.req("LI-03")
def test_a_process_that_was_stopped_has_lost_its_slot(postgres_url: str, tmp_path: Path) -> None:
    """On PostgreSQL: one that is stopped in a transaction on SQLite keeps all others from the file."""
    with new_schema(postgres_url) as schema:
        url = schema.plain_url.replace("postgresql://", "postgresql+psycopg://", 1)
        site = LimitedSite(tmp_path, url, concurrency=2)
        with site.run() as one, site.run() as other:
            survivor, victim, at = silence(site, one, other, signal.SIGSTOP)
            until(lambda: [each for each in site.log("end") if each[1] == 3], seconds=LEASE + 60)
            check_return(site, survivor, at)
            os.kill(victim.workers()[-1], signal.SIGCONT)
            os.kill(victim.process.pid, signal.SIGCONT)
            until(lambda: {each[1] for each in site.log("end")} >= set(range(1, 10)), seconds=60)
            until(lambda: site.slots() == 0)
        site.engine.dispose()


def silence(site: LimitedSite, one: Run, other: Run, how: signal.Signals) -> tuple[Run, Run, float]:
    """Kill or stop a process that has a slot, or both. Returns the other one, that one, and when."""
    until(lambda: one.workers() and other.workers())
    site.send({"number": 1, "seconds": LEASE + 8}, {"number": 2, "seconds": LEASE + 8})
    until(lambda: len(site.log("begin")) == 2)
    time.sleep(1.0)  # it has nothing to do but its handlers
    holders = {each[3] for each in site.log("begin")}
    victim = next(run for run in (one, other) if run.workers()[-1] in holders)
    os.kill(victim.process.pid, how)  # so nobody knows that its worker is silent
    os.kill(victim.workers()[-1], how)
    at = time.monotonic()
    site.send(*({"number": number} for number in range(3, 10)))
    return other if victim is one else one, victim, at


def check_return(site: LimitedSite, survivor: Run, at: float) -> None:
    first = min(each[-1] for each in site.log("begin") if each[1] >= 3)
    assert LEASE / 3 <= first - at <= LEASE + 10  # one lease, and what a busy machine adds
    assert {each[3] for each in site.log("begin") if each[1] >= 3} == {survivor.workers()[-1]}
