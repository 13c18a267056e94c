"""How a run ends: the first signal lets work in flight finish, the second cuts it off, the third kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.run.world import Site
from tests.support.wait import until

SIGTERM, SIGINT = signal.SIGTERM, signal.SIGINT


@pytest.fixture(params=["threads", "asyncio"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return Site(tmp_path, request.param)


def orders(count: int, **what: object) -> list[dict[str, object]]:
    return [{"id": f"o{number}", **what} for number in range(count)]


def test_the_first_signal_lets_what_is_in_flight_end_and_tells_the_source(site: Site) -> None:
    site.send(*orders(20, seconds=0.2))
    with site.run() as run:
        until(lambda: len(site.begun) >= 4)
        run.signal(SIGTERM)
        assert run.ended() == 0
    assert sorted(site.done) == sorted(site.begun), "everything that began has ended"
    assert len(site.done) < 20
    assert site.counts() == {"ready": 20 - len(site.done), "leased": 0, "delayed": 0, "dead": 0}
    with site.run("--drain", "--processes", "2") as run:
        assert run.ended() == 0
    assert sorted(site.done) == sorted(order["id"] for order in orders(20)), "each of them once"


@pytest.mark.parametrize("number", [SIGTERM, pytest.param(SIGINT, marks=pytest.mark.long)])
def test_the_second_signal_cuts_off_what_is_in_flight_which_comes_again(
    site: Site, number: signal.Signals
) -> None:
    site.send({"id": "long", "seconds": 60}, {"id": "short"})
    with site.run() as run:
        until(lambda: site.done == ["short"] and "long" in site.begun)
        run.signal(number)
        until(lambda: run.has_said("stopping"))
        run.signal(number)
        assert run.ended() == 128 + number
        assert run.says("worker 1 left work in flight, which will be redelivered")
    assert site.done == ["short"]
    until(lambda: site.counts() == {"ready": 1, "leased": 0, "delayed": 0, "dead": 0})  # the other is settled


def test_work_that_does_not_end_is_left_and_the_process_ends_all_the_same(site: Site) -> None:
    site.send({"id": "deaf", "deaf": 300})
    with site.run() as run:
        until(lambda: site.begun)
        run.signal(SIGTERM)
        until(lambda: run.has_said("stopping"))
        run.signal(SIGTERM)
        assert run.ended() == 128 + SIGTERM
    until(lambda: site.counts()["ready"] == 1)


def test_what_was_not_begun_goes_back_though_nothing_that_is_in_flight_ends(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.send(*orders(10, deaf=300))
    with site.run() as run:
        until(lambda: len(site.begun) == 4)
        run.signal(SIGTERM)
        until(lambda: site.counts()["ready"] == 6)
        run.signal(SIGTERM)
        assert run.ended() == 128 + SIGTERM
    until(lambda: site.counts() == {"ready": 10, "leased": 0, "delayed": 0, "dead": 0})


@pytest.mark.parametrize("number", [SIGTERM, pytest.param(SIGINT, marks=pytest.mark.long)])
def test_a_signal_that_comes_when_all_is_over_does_not_change_how_it_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Site(tmp_path).run("--drain") as run:
        until(lambda: run.has_said("stopped after"))
        while run.process.poll() is None:
            run.signal(number)
        assert run.ended() == 0


@pytest.mark.parametrize("number", [SIGTERM, pytest.param(SIGINT, marks=pytest.mark.long)])
def test_a_signal_that_comes_while_the_app_is_imported_ends_it_in_good_order(
    tmp_path: Path, number: signal.Signals
) -> None:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(
        "import pathlib, time\npathlib.Path('begun.txt').touch()\ntime.sleep(300)\n"
    )
    with site.run() as run:
        until((tmp_path / "begun.txt").exists)
        run.signal(number)
        assert run.ended() == 0


def test_the_third_signal_kills(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.send({"id": "deaf", "deaf": 300})
    with site.run() as run:
        until(lambda: site.begun)
        for stage in ("stopping", "hurrying", "killing"):
            run.signal(SIGTERM)
            until(lambda stage=stage: run.has_said(stage))
        assert run.ended() == 128 + SIGTERM
        assert run.says("worker 1 was killed by SIGKILL")


def test_work_that_takes_longer_than_the_grace_is_cut_off(site: Site) -> None:
    site.send({"id": "long", "seconds": 60})
    with site.run(ONCEWARD_GRACE="0.2") as run:
        until(lambda: site.begun)
        run.signal(SIGTERM)
        assert run.ended() == 128 + SIGTERM
        assert run.says("hurrying")
    until(lambda: site.counts()["ready"] == 1)


def test_a_signal_for_all_processes_at_once_is_one_signal(tmp_path: Path) -> None:
    """As systemd does: supervisor and workers get the signal at the same time."""
    site = Site(tmp_path)
    site.send(*orders(4, seconds=0.5))
    with site.run() as run:
        until(lambda: len(site.begun) == 4)
        for pid in run.workers():
            os.kill(pid, SIGTERM)
        run.signal(SIGTERM)
        assert run.ended() == 0
    assert len(site.done) == 4


def test_when_the_supervisor_is_killed_its_workers_finish_and_leave(site: Site) -> None:
    site.send(*orders(4, seconds=0.5))
    with site.run() as run:
        until(lambda: len(site.begun) == 4)
        [worker] = run.workers()
        run.signal(signal.SIGKILL)
        assert run.ended() == -signal.SIGKILL
        until(lambda: not Path(f"/proc/{worker}").exists())
        assert run.says("the supervisor is gone")
    assert len(site.done) == 4
    assert site.counts() == {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}
