"""Consumers of one app are independent: what one of them does to its process does not keep the others from working."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from onceward.backoff import Backoff
from onceward.run import supervisor
from onceward.run.protocol import Assignment
from onceward.transaction import Transaction
from tests.support.run.world import Run, Site
from tests.support.wait import until

TWO = """
import os, signal, time
from pathlib import Path

from onceward import Middleware, Onceward


class Break(Middleware):
    name = "break"

    def bind(self, task):
        if Path("break.txt").exists() and type(task).__name__ == "charge":
            raise RuntimeError("as it was asked")
        return self


app = Onceward("shop", middleware=[Break()])
POLICY = {"loop": {"concurrency": {"value": 2}, "empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}}}


@app.consumer("sqlite:///charges.db?lease=3600", policy=POLICY)
def charge(order: dict) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.consumer("sqlite:///orders.db?lease=3600", policy=POLICY)
def mail(order: dict) -> None:
    time.sleep(0.01)
    with Path("done.txt").open("a") as lines:
        lines.write(f"{order['id']}\\n")
"""


DIES_ONCE = """
    if order["id"] == 5 and not Path("died.txt").exists():
        Path("died.txt").touch()
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
"""

EXITS = """
    codes = [0, 2]
    with Path("exits.txt").open("a+") as lines:
        lines.seek(0)
        number = len(lines.readlines())
        lines.write("exit\\n")
    os._exit(codes[number])
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    (tmp_path / "shop.py").write_text(TWO)
    return made


def send_poison(site: Site, number: int) -> None:
    from onceward.connectors import SqliteConnector

    with SqliteConnector(site.directory / "charges.db") as queue:
        queue.dispatch_transactions([Transaction(payload={"id": each}) for each in range(number)])


def crashes_of(run: Run) -> list[str]:
    return [line["message"] for line in run.lines if "was killed by SIGKILL" in line["message"]]


@pytest.mark.req("RN-02", "CC-022")
def test_messages_of_one_consumer_that_kill_their_workers_do_not_hold_up_the_other(site: Site) -> None:
    send_poison(site, 4)
    site.send(*({"id": number} for number in range(400)))
    with site.run("--health", "127.0.0.1:0") as run:
        until(lambda: len(set(site.done)) == 400)
        until(lambda: len(crashes_of(run)) >= 4)
        assert run.says("charge may be the cause and continues alone")
        ended = [message for message in crashes_of(run) if message.startswith("worker 1 ")]
        assert len(ended) <= 2, "from then on, only the worker of charge crashes"
        status = run.get("/progress")[1]
        assert '"consumer": "mail"' in status
        run.signal(signal.SIGTERM)
        assert run.ended() in (0, 143)


@pytest.mark.req("RN-02", "CC-022")
def test_a_consumer_that_cannot_go_on_is_restarted_alone(site: Site) -> None:
    (site.directory / "break.txt").touch()
    with site.run("--health", "127.0.0.1:0") as run:
        until(lambda: run.has_said("charge may be the cause and continues alone in worker 2"))
        site.send({"id": "after"})
        until(lambda: site.done == ["after"])
        until(lambda: run.log.count("charge failed") >= 3)
        (site.directory / "break.txt").unlink()
        site.send({"id": "later"})
        until(lambda: site.done == ["after", "later"])
        until(run.is_ready)
        run.signal(signal.SIGTERM)
        assert run.ended() == 0
    starts = [line["message"] for line in run.lines if line["message"].startswith("worker 1 started")]
    assert len(starts) == 2, "the other was restarted once, without it"


@pytest.mark.req("RN-02", "CC-022")
def test_a_consumer_whose_attempts_get_stuck_continues_alone(site: Site) -> None:
    text = (site.directory / "shop.py").read_text()
    deaf = "while True:\n        time.sleep(0.01)"
    timeout = 'charges.db?lease=3600", policy={**POLICY, "steps": {"process": {"retry": {"timeout": 0.1}}}}'
    text = text.replace('charges.db?lease=3600", policy=POLICY', timeout)
    (site.directory / "shop.py").write_text(text.replace("os.kill(os.getpid(), signal.SIGKILL)", deaf))
    send_poison(site, 1)
    with site.run(ONCEWARD_ENGINE__STUCK_GRACE="0.1") as run:
        until(lambda: run.has_said("charge may be the cause and continues alone in worker 2"))
        site.send({"id": "after"})
        until(lambda: site.done == ["after"])
        run.signal(signal.SIGTERM)
        assert run.ended() == 0


@pytest.mark.req("RN-02", "CC-022")
def test_an_exit_code_that_the_worker_did_not_announce_is_a_crash(site: Site) -> None:
    """A handler that calls `os._exit` chooses the code: it must not pass for the end, or the refusal, of a worker."""
    text = (site.directory / "shop.py").read_text().replace("lease=3600", "lease=3600&max_deliveries=2")
    (site.directory / "shop.py").write_text(
        text.replace("    os.kill(os.getpid(), signal.SIGKILL)", EXITS.strip("\n"))
    )
    send_poison(site, 1)
    with site.run() as run:
        until(lambda: len(site.lines("exits.txt")) == 2)  # each came back at once, not after the lease
        site.send({"id": "after"})
        until(lambda: site.done == ["after"])
        for code in (0, 2):
            until(lambda code=code: run.has_said(f"ended with exit code {code}"))
        run.signal(signal.SIGTERM)
        assert run.ended() == 0


@pytest.mark.req("RN-02")
def test_a_drain_that_gives_up_one_consumer_finishes_the_others(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(site.directory)
    monkeypatch.setattr(supervisor, "MAX_CRASHES", 2)
    monkeypatch.setattr(supervisor, "RESTART", Backoff(0.01))
    text = (site.directory / "shop.py").read_text().replace("orders.db?lease=3600", "orders.db?lease=0.3")
    wait = 'while not Path("go.txt").exists():\n        time.sleep(0.01)'
    (site.directory / "shop.py").write_text(text.replace("time.sleep(0.01)", wait))
    # Enough for every worker that starts: the leases of dead ones are not released here.
    send_poison(site, 1000)
    site.send(*({"id": number} for number in range(30)))

    async def run() -> int:
        async def go() -> None:
            while "giving up" not in caplog.text:
                await asyncio.sleep(0.01)
            Path("go.txt").touch()

        going = asyncio.ensure_future(go())
        given = {"target": "shop:app", "log_format": "json", "log_level": "info", "env": None}
        assignment = Assignment(**given, number=0, drain=True, grace=5.0, concurrency=None)  # type: ignore[arg-type]
        code = await supervisor.Supervisor(assignment, 1).run()
        await going
        return code

    assert asyncio.run(run()) == 1
    assert len(set(site.done)) == 30


@pytest.mark.req("RN-03")
def test_only_the_named_consumers_run(site: Site) -> None:
    send_poison(site, 1)
    site.send({"id": "a"})
    with site.run("--only", "mail, mail,", "--drain") as run:
        assert run.ended() == 0
    assert site.done == ["a"]
    assert crashes_of(run) == []
    assert run.says("running mail of shop")


@pytest.mark.req("RN-03")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("mial", "did you mean 'mail'?"),
        ("mail,zzz", "it has charge, mail"),
        (" , ", "--only names no consumer"),
    ],
)
def test_an_unknown_name_is_refused_with_the_one_that_was_meant(site: Site, given: str, says: str) -> None:
    with site.run("--only", given) as run:
        assert run.ended() == 2
        assert run.says(says)


@pytest.mark.req("RN-04")
def test_the_last_line_counts_what_workers_did_before_they_were_killed(site: Site) -> None:
    text = (site.directory / "shop.py").read_text()
    text = text.replace("    time.sleep(0.01)", DIES_ONCE)
    (site.directory / "shop.py").write_text(text)
    site.send(*({"id": number} for number in range(20)))
    with site.run("--only", "mail", "--drain") as run:
        assert run.ended() == 0
    [last] = [line["message"] for line in run.lines if line["message"].startswith("stopped after")]
    assert "mail: 20 succeeded" in last
    assert "cut off when a worker ended, which are delivered again" in last
