"""Workers that crash, hang or cannot start, and what happens to the run."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from onceward.backoff import Backoff
from onceward.connectors import BurialReason
from onceward.run import supervisor as supervising
from onceward.run.protocol import Assignment
from onceward.run.supervisor import Supervisor
from tests.support.run.world import SHOP, Site
from tests.support.wait import until, until_async

CONTRACTED = """
from onceward import Onceward
from onceward.inbox import Contract

app = Onceward("shop", database="sqlite:///shop.db")
contract = Contract(consumer_id="billing", event_types=["*"], owner_team="t", idempotency_mechanism="inbox row")


@app.consumer("sqlite:///orders.db", contract=contract)
{kind} charge(order: dict, session) -> None: ...


@app.consumer("sqlite:///letters.db")
{kind} mail(order: dict) -> None: ...
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def assignment(drain: bool) -> Assignment:
    return Assignment(
        target="shop:app",
        number=0,
        drain=drain,
        grace=10.0,
        log_format="json",
        log_level="info",
        env=None,
        concurrency=1,
    )


@pytest.fixture
def hasty(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The supervisor runs in this process, in the site's directory, and waits only briefly after crashes."""
    monkeypatch.chdir(site.directory)
    for name, value in site.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(supervising, "RESTART", Backoff(0.01, cap=0.3))
    return site


@contextmanager
def free_port() -> Iterator[int]:
    """A port that no process listens on, and that no other test gets."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def supervised(**given: object) -> int:
    async def run() -> int:
        return await Supervisor(assignment(**given), processes=1).run()  # type: ignore[arg-type]

    return asyncio.run(run())


# ── crashes ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_is_killed_is_reported_and_another_takes_its_place(site: Site) -> None:
    with site.run("--processes", "2", "--health", "127.0.0.1:0") as run:
        until(
            lambda: len(run.workers()) == 2 and run.is_ready()
        )  # one that starts may hold a lock of the queue
        victim, survivor = run.workers()
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(run.workers()) == 3)
        assert run.says("worker 1 was killed by SIGKILL; restarting in 0.5 s")
        os.kill(survivor, signal.SIGSTOP)  # so the new one does the work
        site.send({"id": "after"})
        until(lambda: site.done == ["after"])
        os.kill(survivor, signal.SIGCONT)
        run.signal(signal.SIGTERM)
        assert run.ended() == 0


def test_a_message_that_kills_its_workers_is_buried_and_the_rest_is_done(
    hasty: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RUN_SOURCE", "sqlite:///orders.db?lease=0.3&max_deliveries=2")
    hasty.send({"id": "bad", "die": True}, {"id": "good"})
    with caplog.at_level(logging.INFO):
        codes = [supervised(drain=True)]
        while (
            hasty.counts()["ready"] + hasty.counts()["leased"]
        ):  # its lease was still valid when the rest was done
            codes.append(supervised(drain=True))
    assert set(codes) == {0}
    assert hasty.done == ["good"]
    with hasty.queue() as queue:
        [dead] = queue.dead_letters()
    assert dead.reason is BurialReason.MAX_DELIVERIES
    assert "worker 1 was killed by SIGKILL" in caplog.text


def waits(caplog: pytest.LogCaptureFixture) -> list[object]:
    return [record.args[-1] for record in caplog.records if "restarting in" in record.message]  # type: ignore[index]


def test_the_wait_doubles_with_each_crash_and_a_drain_gives_up_in_the_end(
    hasty: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervising, "MAX_CRASHES", 3)
    (hasty.directory / "shop.py").write_text("raise RuntimeError('as it was asked')")
    assert supervised(drain=True) == 1
    assert waits(caplog) == [0.01, 0.02, 0.04]
    assert "giving up" in caplog.text


def test_a_worker_that_has_worked_for_a_while_crashes_as_if_for_the_first_time(
    hasty: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervising, "STEADY", 0.0)
    (hasty.directory / "shop.py").write_text("raise RuntimeError('as it was asked')")

    async def run() -> int:
        supervisor = Supervisor(assignment(drain=False), processes=1)
        running = asyncio.ensure_future(supervisor.run())
        await until_async(lambda: supervisor.places[0].restarts >= 2)
        supervisor.on_signal(signal.SIGTERM)
        return await running

    asyncio.run(run())
    assert set(waits(caplog)) == {0.01}


# ── a source that is away ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["threads", pytest.param("asyncio", marks=pytest.mark.long)])
def test_a_drain_waits_for_a_source_that_is_away_and_gives_up_after_a_while(
    tmp_path: Path, mode: str
) -> None:
    site = Site(tmp_path, mode)
    text = f"{SHOP.read_text()}\nfrom onceward.run import outages\noutages.PATIENCE = 0.5\n"
    (tmp_path / "shop.py").write_text(text)
    with free_port() as port:
        nobody = f"redis://127.0.0.1:{port}/orders?group=shop"
        with site.run("--drain", "--processes", "2", RUN_SOURCE=nobody) as run:
            assert run.ended() == 1
            waiting = [
                line for line in run.lines if "is waiting for its source or database" in line["message"]
            ]
            assert run.says("charge gave up after waiting 0.5 s for its source or database: ")
            assert run.says("stopped after")
    assert len(waiting) >= 2
    assert {line["level"] for line in waiting} == {"warning"}
    loud = [line for line in run.lines if line["level"] not in ("info", "warning")]
    assert {line["level"] for line in loud} == {"critical"}, (
        "an outage is not an error until the run gives up"
    )


# ── a stuck thread ──────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_with_a_stuck_thread_ends_its_other_work_and_is_replaced(site: Site) -> None:
    site.send({"id": "deaf", "deaf": 300}, {"id": "slow", "seconds": 1})
    source = "sqlite:///orders.db?on_failure=dead_letter"
    with site.run(RUN_TIMEOUT="1.5", RUN_SOURCE=source, ONCEWARD_ENGINE__STUCK_GRACE="0.2") as run:
        until(lambda: len(run.workers()) == 2)
        assert run.says("a thread is stuck")
        assert run.says("worker 1 had a stuck thread; restarting")
        site.send({"id": "after"})
        until(lambda: "after" in site.done)
        run.signal(signal.SIGTERM)
        assert run.ended() == 0
    assert site.done == ["slow", "after"]
    assert site.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 1}


# ── what cannot run ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usual("async def")
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_in_production_a_consumer_without_proof_ends_the_run_with_2_and_is_reported_once(
    site: Site, kind: str
) -> None:
    (site.directory / "shop.py").write_text(CONTRACTED.format(kind=kind))
    with site.run("--env", "production", "--processes", "2") as run:
        assert run.ended() == 2
        assert run.log.count("consumer 'billing' does not run in production") == 1
        assert run.log.count("consumer 'mail' does not run in production") == 1, "all are named at once"
        assert run.says("onceward verify")


# ── new code ────────────────────────────────────────────────────────────────────────────────────────────


def test_with_reload_changed_code_is_what_runs_next_and_broken_code_is_waited_out(site: Site) -> None:
    shop = site.directory / "shop.py"
    with site.run("--reload") as run:
        until(run.workers)
        shop.write_text("import no_such_module\n")
        until(lambda: run.has_said("No module named 'no_such_module'"))
        shop.write_text(SHOP.read_text().replace('note("done.txt"', 'note("done-again.txt"'))
        site.send({"id": "o1"})
        until(lambda: site.lines("done-again.txt") == ["o1"])
        assert run.says("shop.py changed")
        run.signal(signal.SIGINT)
        assert run.ended() == 0


def test_a_worker_that_cannot_be_started_is_tried_again(site: Site) -> None:
    with site.run() as run:
        until(run.workers)
        pid = run.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        run.signal_worker(signal.SIGKILL)
        until(
            lambda: run.has_said(
                "worker 1 could not be started: [Errno 24] Too many open files; restarting in"
            )
        )
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        site.send({"id": 1})
        until(lambda: site.done == ["1"])
        run.signal(signal.SIGTERM)
        assert run.ended() == 0


def test_connections_that_take_all_files_leave_some_for_workers(site: Site) -> None:
    with ExitStack() as connections, site.run("--health", "127.0.0.1:0") as run:
        until(run.is_ready)
        _, hard = resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (48, hard))
        port = int(run.url.rpartition(":")[2])
        for _ in range(100):
            connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        assert run.get("/livez")[0] == 200
        run.signal_worker(signal.SIGKILL)
        site.send({"id": 1})
        until(lambda: site.done == ["1"])
        until(run.is_ready)
        assert len(run.log) < 20_000
