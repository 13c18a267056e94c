"""Several processes and a provider that is down: one probe for all, nothing is lost, counted or done twice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from onceward.connectors import SqliteConnector
from onceward.failures.middleware import LEASE
from onceward.failures.rules import PROBE_EVERY
from onceward.storage.database import BlockingStoragePorts
from onceward.transaction import Transaction
from tests.support.failures import Provider, ShopSite, provider, warnings_of
from tests.support.run.world import Run
from tests.support.schema import new_schema
from tests.support.wait import until

IDLE = """

@app.consumer("sqlite:///idle.db", name="idle", contract=None, depends_on=["payments"])
def idle(order: dict) -> None: ...
"""
"""It needs the same provider, and has no messages."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Provider, ShopSite]]:
    with provider() as (state, url):
        site = ShopSite(tmp_path, url, f"sqlite:///{tmp_path}/shop.db")
        yield state, site
        site.engine.dispose()


def held(run: Run) -> list[str]:
    status, body = run.get("/readyz")
    page = json.loads(body)
    assert (status, page["ok"]) == (200, True), "degraded is ready"
    return list(page["degraded"])


@pytest.mark.req("OU-03", "OU-04", "OU-08", "OU-10")
@pytest.mark.parametrize(
    ("messages", "seconds"),
    [(300, 4.0), pytest.param(10_000, 60.0, marks=pytest.mark.long)],
    ids=["short", "a minute"],
)
def test_an_outage_costs_nothing_but_time(
    messages: int, seconds: float, place: tuple[Provider, ShopSite]
) -> None:
    state, site = place
    with site.run("--health", "127.0.0.1:0", "--processes", "2") as run:
        until(run.is_ready)
        assert held(run) == []
        state.down = True
        site.order(range(messages))
        until(lambda: len(held(run)) == 2)
        down_at = time.monotonic()
        reasons = held(run)
        assert all("charge is waiting for payments, which is down since" in each for each in reasons)
        assert all("HTTP Error 503" in each for each in reasons)
        metrics = run.get("/metrics")[1]
        assert metrics.count('onceward_consumer_outage{consumer="charge",worker="1"} 1.0') == 1
        assert 'onceward_consumer_outage{consumer="greet",worker="1"} 0.0' in metrics
        with SqliteConnector(site.directory / "letters.db") as letters:  # another consumer goes on
            letters.dispatch_transactions([Transaction(payload={})])
        until(lambda: site.lines("greeted.txt"))
        time.sleep(max(down_at + seconds - time.monotonic(), 0.0))
        assert site.charged() == []
        probes = [at for at in state.refused if at > down_at + 0.5]
        assert len(probes) >= seconds / 4
        assert all(after - before >= PROBE_EVERY for before, after in pairwise(probes))
        state.down = False
        up_at = time.monotonic()
        until(lambda: len(site.charged()) == messages - 1, seconds=240)
        if (
            messages >= 10_000
        ):  # two seconds after it is up, it is as fast as later, give or take what the machine does
            average = len(state.served) / (state.served[-1] - up_at)
            soon = [at for at in state.served if up_at + 2.0 <= at < up_at + 6.0]
            assert len(soon) / 4 >= average / 2, "it does not go on at full rate"
        until(lambda: held(run) == [])
        assert site.charged() == [number for number in range(messages) if number != 7]
        until(lambda: site.dead() == 1)
        for process in (1, 2):
            lines = [line for line in warnings_of(run) if "payments is" in line]
            assert len([line for line in lines if "is down" in line]) == 2, process
            assert len([line for line in lines if "is up again" in line]) == 2, process


@pytest.mark.req("OU-04", "OU-13")
def test_when_the_prober_is_killed_another_process_probes(place: tuple[Provider, ShopSite]) -> None:
    state, site = place
    with (site.directory / "shop.py").open("a") as shop:
        shop.write(IDLE)
    with site.run("--health", "127.0.0.1:0") as one, site.run("--health", "127.0.0.1:0") as other:
        until(lambda: one.is_ready() and other.is_ready())
        state.down = True
        site.order(range(40))
        until(lambda: held(one) and held(other))
        os.kill(one.process.pid, signal.SIGSTOP)  # so it does not start another worker
        os.kill(one.workers()[-1], signal.SIGKILL)
        killed_at = time.monotonic()
        until(lambda: [at for at in state.refused if at > killed_at + LEASE], seconds=LEASE + 30)
        state.down = False
        # What the dead worker held comes back when its leases expire; all others are done.
        until(lambda: len(site.charged()) >= 20)
        os.kill(one.process.pid, signal.SIGCONT)


@pytest.mark.req("OU-07", "OU-08", "OU-12")
def test_a_consumer_is_paused_and_resumed_while_it_runs_and_while_it_does_not(
    place: tuple[Provider, ShopSite],
) -> None:
    _, site = place
    code, text = site.command("pause", "charge")
    assert (code, "tables of the inbox do not exist" in text) == (2, True)
    with site.run("--health", "127.0.0.1:0") as run:
        until(run.is_ready)
        site.order(range(10, 12))
        until(lambda: len(site.charged()) == 2)
        code, text = site.command("pause", "chrage")
        assert code == 2
        assert "there is no consumer 'chrage' in this database; it knows billing (charge), greet" in text
        assert site.command("pause", "charge", "--reason", "maintenance", "--operator", "anna") == (
            0,
            "charge is paused; running processes notice within two seconds.\n",
        )
        began = time.monotonic()
        until(lambda: held(run))
        noticed = time.monotonic() - began
        [reason] = held(run)
        assert "charge is paused by anna since " in reason
        assert reason.endswith(": maintenance")
        assert 'onceward_consumer_paused{consumer="charge",worker="1"} 1.0' in run.get("/metrics")[1]
        site.order(range(20, 23))
        time.sleep(1.0)
        assert len(site.charged()) == 2
        assert run.consumer()["in_flight"] == 0
        code, text = site.command("pause", "billing")
        assert (code, "charge was paused already, by anna since " in text) == (0, True)
        assert text.endswith(": maintenance\nNothing was changed; give a --reason to replace it.\n")
        text = site.command("pause", "charge", "--reason", "until 15:00", "--operator", "ben")[1]
        assert "paused already, by anna" in text
        assert text.endswith("stored instead; the audit log keeps both.\n")
        until(lambda: "paused by ben since " in held(run)[0] and held(run)[0].endswith(": until 15:00"))
        until(lambda: len([line for line in warnings_of(run) if "charge is paused by" in line]) == 2)
        site.command("pause", "greet", "--reason", "a typo", "--operator", "anna")
        listed = json.loads(site.command("consumers", "list", "--json")[1])
        assert [(each["consumer_id"], each["contract"] is None) for each in listed] == [
            ("billing", False),
            ("greet", True),
        ]
        assert listed[0]["paused"].startswith("by ben since ")
        assert listed[1]["paused"].startswith("by anna since ")
        assert listed[1]["paused"].endswith(": a typo")
        for command in (("list",), ("show", "greet")):
            code, text = site.command("consumers", *command)
            assert (code, "by anna since " in text, ": a typo" in text) == (0, True, True)
        assert site.command("resume", "greet")[0] == 0
        run.signal(signal.SIGTERM)
        assert run.ended() == 0
    assert noticed < 10  # two seconds, and what a busy machine adds
    with site.run("--health", "127.0.0.1:0") as run:  # it survives a restart
        until(lambda: run.is_ready() and held(run))
        assert site.command("resume", "charge")[1] == "charge is resumed.\n"
        until(lambda: len(site.charged()) == 5)
        assert held(run) == []
        assert site.command("resume", "charge")[1] == "charge was not paused.\n"
    actions = [row["action"] for row in json.loads(site.command("audit", "list", "--json")[1])]
    assert actions == ["resume", "resume", "pause", "pause", "pause"]


@pytest.mark.req("OU-04")
def test_the_records_are_fenced_in_postgresql_too(postgres_url: str) -> None:
    from sqlalchemy import create_engine

    from onceward._sync import run_blocking
    from onceward.failures.records import FleetRecords
    from onceward.inbox import Inbox

    with new_schema(postgres_url) as schema:
        engine = create_engine(schema.url, connect_args=schema.connect_args)
        Inbox(engine).migrate()
        check_fence(FleetRecords(BlockingStoragePorts(engine)), run_blocking)
        check_release(BlockingStoragePorts(engine))
        engine.dispose()


def test_the_records_are_fenced_in_sqlite(tmp_path: Path) -> None:
    from sqlalchemy import create_engine

    from onceward._sync import run_blocking
    from onceward.failures.records import FleetRecords
    from onceward.inbox import Inbox

    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    Inbox(engine).migrate()
    check_fence(FleetRecords(BlockingStoragePorts(engine)), run_blocking)
    check_release(BlockingStoragePorts(engine))
    engine.dispose()


def test_the_records_of_one_process_are_fenced() -> None:
    from onceward._sync import run_blocking
    from onceward.failures.states import ProcessRecords

    check_fence(ProcessRecords(), run_blocking)


def check_fence(records, run) -> None:  # type: ignore[no-untyped-def]
    """A probe has one owner, one who lost it changes nothing, and who needs two gets both or none."""
    now = {"dependency:payments": 0.0}
    assert run(records.declare("dependency:payments", "it is gone", 0.0))
    assert not run(records.declare("dependency:payments", "again", 0.0))
    until(lambda: run(records.read()).down["dependency:payments"].due_in <= 0)
    first = run(records.take_probes(now, 0.05))["dependency:payments"]
    until(lambda: not run(records.read()).down["dependency:payments"].probing)
    second = run(records.take_probes(now, 60.0))["dependency:payments"]
    assert second != first
    assert run(records.take_probes(now, 60.0)) is None
    assert not run(records.keep_probe("dependency:payments", first, 60.0))
    assert not run(records.end("dependency:payments", first))
    run(records.fail_probe("dependency:payments", first, "late", 60.0))
    run(records.release_probe("dependency:payments", first))
    down = run(records.read()).down["dependency:payments"]
    assert (down.reason, down.probes, down.probing) == ("it is gone", 0, True)
    run(records.fail_probe("dependency:payments", second, "still gone", 30.0))
    down = run(records.read()).down["dependency:payments"]
    assert (down.reason, down.probes, down.probing) == ("still gone", 1, False)
    assert 0 < down.due_in <= 30
    assert run(records.take_probes(now, 60.0)) is None
    assert run(records.declare("dependency:mail", "it is gone, too", 0.0))
    until(lambda: run(records.read()).down["dependency:mail"].due_in <= 0)
    assert run(records.take_probes({"dependency:mail": 60.0, **now}, 60.0)) is None
    assert not run(records.read()).down["dependency:mail"].probing
    assert run(
        records.end(
            "dependency:mail", run(records.take_probes({"dependency:mail": 0.0}, 60.0))["dependency:mail"]
        )
    )
    assert run(records.end("dependency:payments", second))
    assert run(records.read()).down == {}


def check_release(ports: BlockingStoragePorts) -> None:
    """The supervisor gives back what a dead worker had, and nothing of others."""
    from onceward._sync import run_blocking as run
    from onceward.failures.records import FleetRecords, free_probes
    from onceward.storage.database import Sql

    anna, ben = (FleetRecords(ports, owner=each) for each in ("anna", "ben"))
    for subject in ("dependency:a", "dependency:b"):
        run(anna.declare(subject, "it is gone", 0.0))
        until(lambda subject=subject: run(anna.read()).down[subject].due_in <= 0)
    assert run(anna.take_probes({"dependency:a": 0.0}, 60.0))
    assert run(ben.take_probes({"dependency:b": 0.0}, 60.0))
    run(ports.transact(free_probes, Sql(ports.dialect.name), "anna"))
    assert [each.probing for _, each in sorted(run(anna.read()).down.items())] == [False, True]
