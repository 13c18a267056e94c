"""Consumers of one app are independent: what one of them does to its process does not keep the others from working."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

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
        until(lambda: run.says("charge may be the cause and continues alone in worker 2"))
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


@pytest.mark.req("RN-03")
def test_only_the_named_consumers_run(site: Site) -> None:
    send_poison(site, 1)
    site.send({"id": "a"})
    with site.run("--only", "mail", "--drain") as run:
        assert run.ended() == 0
    assert site.done == ["a"]
    assert crashes_of(run) == []
    assert run.says("running mail of shop")


@pytest.mark.req("RN-03")
@pytest.mark.parametrize(
    ("given", "says"), [("mial", "did you mean 'mail'?"), ("mail,zzz", "it has charge, mail")]
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
