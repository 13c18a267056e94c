"""Services in a run: opened once in each worker, before the first message, and closed after the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run.world import Site
from tests.support.wait import until

APP = """
from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from onceward import Onceward

app = Onceward("shop")


class Settings: ...


class Payments: ...


class Http: ...


def note(line: object) -> None:
    with Path("diary.txt").open("a") as diary:
        diary.write(f"{os.getpid()}:{line}\\n")


@app.service
def settings() -> Iterator[Settings]:
    note("open-settings")
    yield Settings()
    note("close-settings")


@app.service
def payments(settings: Settings) -> Iterator[Payments]:
    if "NO_PROVIDER" in os.environ:
        raise ConnectionRefusedError("no provider")
    note("open-payments")
    yield Payments()
    note("close-payments")
    raise ConnectionResetError("hung up")


@app.service
async def http(settings: Settings) -> AsyncIterator[Http]:
    if "NO_NETWORK" in os.environ:
        raise ConnectionRefusedError("no network")
    note("open-http")
    yield Http()
    note("close-http")


@app.consumer("sqlite:///orders.db")
def charge(order: dict, pay: Payments) -> None:
    note("charge")


@app.consumer("sqlite:///mails.db")
async def mail(order: dict, http: Http, pay: Payments) -> None:
    note("mail")
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(APP)
    site.send({"id": "a"}, {"id": "b"})
    return site


@pytest.mark.req("CC-065")
def test_each_worker_opens_services_once_and_closes_them_in_reverse_order(site: Site) -> None:
    with site.run("--drain", "--processes", "2") as run:
        assert run.ended() == 0
        assert "ConnectionResetError: hung up" in run.log
        assert "service payments (shop.py:" in run.log
        workers = run.workers()
    lines = [line.split(":") for line in site.lines("diary.txt")]
    assert {int(pid) for pid, _ in lines} == set(workers), "in each worker, not in the supervisor"
    for worker in workers:
        own = [what for pid, what in lines if int(pid) == worker]
        others = [what for what in own if what != "charge"]
        assert others[:3] == own[:3] == ["open-settings", "open-payments", "open-http"]
        assert others[3:] == ["close-http", "close-payments", "close-settings"]
        # Only mail uses http, so http may close while charge still has a message.
        assert own[-2:] == ["close-payments", "close-settings"]


@pytest.mark.req("CC-065")
@pytest.mark.parametrize(
    ("missing", "service"), [("NO_PROVIDER", "payments"), ("NO_NETWORK", "http")], ids=["threads", "asyncio"]
)
def test_nothing_is_consumed_if_a_service_cannot_be_opened(site: Site, missing: str, service: str) -> None:
    with site.run(**{missing: "1"}) as run:
        until(lambda: run.has_said("restarting in"))
        assert run.says(f"service {service} (shop.py:")
        assert run.says("cannot be opened: ConnectionRefusedError")
    assert not any("charge" in line for line in site.lines("diary.txt"))
    assert any("close-settings" in line for line in site.lines("diary.txt"))
    assert site.counts()["ready"] == 2
