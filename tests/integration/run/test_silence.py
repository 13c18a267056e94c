"""A run whose sources accept connections and never answer: a signal ends it, and nothing waits for them in the end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onceward import Onceward
from onceward.run import release
from onceward.run.worker import Worker
from tests.support.run.world import Site
from tests.support.silence import SilentServer, silent_server
from tests.support.wait import until

SEVERAL = """
import os
from onceward import Onceward

app = Onceward("shop")

def add(number):
    if (number % 2 == 0) == (os.environ["RUN_MODE"] == "asyncio"):
        async def wait(order: dict) -> None: ...
    else:
        def wait(order: dict) -> None: ...
    app.consumer(f"{os.environ['RUN_SOURCE']}-{number}", name=f"silent{number}")(wait)

for number in range(3):
    add(number)
"""


@pytest.fixture
def server() -> Iterator[SilentServer]:
    with silent_server() as made:
        yield made


@pytest.mark.req("RN-15")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_a_signal_ends_a_run_although_none_of_its_sources_answers(
    tmp_path: Path, server: SilentServer, mode: str
) -> None:
    site = Site(tmp_path, mode)
    (tmp_path / "shop.py").write_text(SEVERAL)
    with site.run(ONCEWARD_GRACE="50", RUN_SOURCE=f"redis://:secret@127.0.0.1:{server.port}/0/orders") as run:
        until(server.heard.is_set)
        run.signal(signal.SIGTERM)
        assert run.ended() == 0
        assert not run.has_said("hurrying")


def releases_of(*holders: tuple[str, release.Holder]) -> release.Releases:
    made = release.Releases(Onceward("shop"))
    made._holders = list(holders)
    return made


@pytest.mark.req("RN-15")
@pytest.mark.parametrize("stops", ["before", "meanwhile"])
def test_a_run_that_stops_does_not_wait_for_a_source_that_is_asked_to_take_back(
    monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    monkeypatch.setattr(release, "FIRST_ROUND", 3600.0)
    silence, asked = threading.Event(), threading.Event()

    def hold(owner: str) -> int:
        asked.set()
        return int(silence.wait())

    async def stop_and_wait() -> None:
        stopping = asyncio.Event()
        if stops == "before":
            stopping.set()
        waiting = asyncio.ensure_future(releases_of(("silent", hold))("worker 1", "owner", stopping))
        await asyncio.to_thread(asked.wait)
        stopping.set()
        await waiting

    try:
        asyncio.run(stop_and_wait())
    finally:
        silence.set()


@pytest.mark.req("RN-15")
def test_a_source_that_does_not_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "AGAIN", ())
    silence, released = threading.Event(), threading.Event()

    def hold(owner: str) -> int:
        return int(silence.wait()) - 1

    def give_back(owner: str) -> int:
        released.set()
        return 0

    releases = releases_of(("silent", hold), ("answers", give_back))
    rounds = threading.Thread(target=releases._rounds, args=("worker 1", "owner", lambda: None))
    rounds.start()
    try:
        until(released.is_set)
    finally:
        silence.set()
        rounds.join()


@pytest.mark.req("RN-15")
@pytest.mark.parametrize(
    ("problem", "begun", "leaves"), [("silent", False, True), (None, False, False), ("silent", True, False)]
)
def test_a_worker_that_stops_waits_for_no_consumer_that_a_silent_database_kept_from_beginning(
    problem: str | None, begun: bool, leaves: bool
) -> None:
    worker: Any = Worker(None, 0, None)  # type: ignore[arg-type]
    worker._databases = {"the server": SimpleNamespace(problem=problem)}
    worker._running = {FakeKeeper(begun), FakeKeeper(False)}
    worker._leave_a_silent_database()
    assert (worker._leave_at < inf) is leaves


class FakeKeeper:
    in_flight = 0

    def __init__(self, has_begun: bool) -> None:
        self.has_begun = has_begun


SILENT_DATABASE = """
import os
from onceward import Contract, Onceward

silent, mode = os.environ["RUN_SILENT"], os.environ["RUN_MODE"]
if os.environ["RUN_KIND"] == "queue":
    app = Onceward("shop")

    if mode == "asyncio":
        async def charge(order: dict) -> None: ...
    else:
        def charge(order: dict) -> None: ...
    app.consumer(f"{silent}?queue=orders")(charge)
else:
    app = Onceward("shop", database=silent)
    contract = Contract(
        consumer_id="billing", event_types=["*"], owner_team="money", idempotency_mechanism="bill and dedup row"
    )

    if mode == "asyncio":
        async def charge(order: dict, session) -> None: ...
    else:
        def charge(order: dict, session) -> None: ...
    app.consumer("sqlite:///orders.db", contract=contract)(charge)
"""


@pytest.mark.usual("inbox")
@pytest.mark.req("RN-15")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
@pytest.mark.parametrize("kind", ["queue", "inbox"])
def test_a_worker_that_connects_to_a_silent_postgresql_does_not_wait_for_it_in_the_end(
    tmp_path: Path, server: SilentServer, mode: str, kind: str
) -> None:
    site = Site(tmp_path, mode)
    (tmp_path / "shop.py").write_text(SILENT_DATABASE)
    silent = f"postgresql://u:secret@127.0.0.1:{server.port}/shop"
    with site.run(ONCEWARD_GRACE="500", RUN_SILENT=silent, RUN_KIND=kind) as run:
        assert run.says("worker 1 started")
        server.heard.clear()
        until(server.heard.is_set)  # the worker asks
        run.signal(signal.SIGTERM)
        assert run.ended() == 0
        # That would be logged at the end of the time to connect.
        assert not run.has_said("while stopping")
        assert not run.has_said("while the loop was ending")
