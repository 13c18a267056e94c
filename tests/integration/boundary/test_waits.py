"""Fetches that wait for a fact."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from onceward.boundary import BoundaryClient, envelope_for, fact_of
from onceward.boundary.errors import Unavailable
from onceward.connectors.boundary import BoundaryConnector
from tests.support.boundary.server import Served, boundary_server, served
from tests.support.wait import until

pytestmark = pytest.mark.req("WK-05")

LONG = 20.0


def append(url: str, number: int) -> None:
    with BoundaryClient(url) as client:
        client.append(
            envelope_for(f"m{number}", from_zone="a", to_zone="b"), fact_of("order:1", "placed", number)
        )


def test_a_fetch_that_waits_is_answered_when_a_fact_is_appended(tmp_path: Path) -> None:
    with boundary_server(tmp_path) as url, BoundaryClient(url) as client:
        assert client.fetch("c").facts == ()
        began = time.monotonic()
        assert client.fetch("c", wait=0.3).facts == ()
        assert time.monotonic() - began >= 0.29
        sender = threading.Timer(0.2, append, (url, 1))
        sender.start()
        began = time.monotonic()
        assert [each.offset for each in client.fetch("c", wait=LONG).facts] == [1]
        assert time.monotonic() - began < LONG / 2
        sender.join()
        assert [each.offset for each in client.fetch("c", wait=LONG).facts] == [1]  # it is there
        began = time.monotonic()
        client.fetch("c", wait=0.3, wait_after=1)
        assert time.monotonic() - began >= 0.29
        assert client.fetch("new", wait=LONG).facts  # a consumer that is not registered yet


def test_a_server_that_stops_answers_those_that_wait(tmp_path: Path) -> None:
    server = Served(tmp_path / "data")
    with BoundaryClient(server.url) as client:
        client.fetch("c")
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(client.fetch("c", wait=LONG)))
        waiting.start()
        time.sleep(0.3)
        began = time.monotonic()
        code, _ = server.end(signal.SIGTERM)
        waiting.join(LONG)
    assert code == 0
    assert time.monotonic() - began < 4.0  # it does not need all the time that calls get
    assert [each.facts for each in answers] == [()]


@pytest.mark.req("BC-61")
def test_a_fetch_that_waits_costs_the_server_nothing(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server, BoundaryClient(server.url) as client:

        def busy() -> float:
            fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        client.fetch("c")
        before = busy()
        assert client.fetch("c", wait=2.0).facts == ()
        assert busy() - before < 0.5


@pytest.mark.req("BC-61")
def test_a_fetch_that_waits_ends_with_its_caller(tmp_path: Path) -> None:
    (tmp_path / "boundary.toml").write_text("[limits]\ncalls = 1\n")
    path = b"/onceward.boundary.v1.BoundaryService/FetchFacts"
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % path
    body = b'{"consumerName": "c", "limit": 1, "waitMs": 20000}'
    with (
        served(tmp_path / "data", "--config", str(tmp_path / "boundary.toml")) as server,
        BoundaryClient(server.url) as client,
    ):

        def is_refused() -> bool:
            with suppress(Unavailable):
                client.fetch("c")
                return False
            return True

        def is_waiting() -> bool:
            """Whether it is not answered at once, as it is while another call ends."""
            caller = waiting.enter_context(socket.create_connection(place, timeout=0.5))
            caller.sendall(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
            with suppress(TimeoutError):
                return not caller.recv(1)
            return True

        place = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        assert not is_refused()
        with ExitStack() as waiting:
            until(is_waiting)
            assert is_refused()
        began = time.monotonic()
        until(lambda: not is_refused())
        assert time.monotonic() - began < LONG / 4


def test_a_boundary_that_does_not_wait_is_asked_now_and_then(tmp_path: Path) -> None:
    calls = 0

    class Older(BoundaryClient):
        def fetch(self, consumer_name: str, limit: int = 100, max_bytes: int = 0, **_: Any) -> Any:
            nonlocal calls
            calls += 1
            return super().fetch(consumer_name, limit, max_bytes)

    with boundary_server(tmp_path) as url, Older(url) as client, BoundaryConnector(client, "c") as source:
        until, taken = time.monotonic() + 1.0, []
        while time.monotonic() < until:
            taken += source.fetch_transactions(10)
            source.await_transactions(LONG)
        assert taken == []
        assert calls <= 30
        append(url, 1)
        while not taken:
            taken += source.fetch_transactions(10)
            source.await_transactions(LONG)
        assert [each.id for each in taken] == ["m1"]
