"""A boundary that does not answer: Ctrl-C ends a call in the main thread, stop() a consumer. Neither waits for it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from onceward.boundary import BoundaryClient, envelope_for, fact_of
from onceward.boundary.certs import Authority
from onceward.boundary.errors import NotFound
from tests.support.boundary.consumer_world import BoundaryWorld, book
from tests.support.processes import LoggedProcess
from tests.support.silence import once, silent_server
from tests.support.wait import until

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

FACT = fact_of("batch:B1", "completed", {"number": 1})
ENVELOPE = envelope_for("message-1", from_zone="plant-a", to_zone="hq")


@pytest.fixture
def world(sqlite: Database, tmp_path: Path) -> Iterator[BoundaryWorld]:
    with BoundaryWorld(sqlite, tmp_path) as made:
        yield made


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def never_answered(client: BoundaryClient) -> dict[str, Callable[[], object]]:
    return {
        "append": lambda: client.append(ENVELOPE, FACT),
        "append_until_durable": lambda: client.append_until_durable(ENVELOPE, FACT),
        "fetch": lambda: client.fetch("hq-receiver"),
        "confirm": lambda: client.confirm("hq-receiver", 1),
        "put": lambda: client.put("reports", "one", b"1"),
        "put_stream": lambda: client.put_stream("reports", "one", [b"1", b"2"]),
        "get": lambda: client.get("reports", "one"),
        "get_pieces": lambda: list(client.get_pieces("reports", "one")),
    }


@pytest.mark.req("BC-46")
@pytest.mark.parametrize("call", list(never_answered(None)))  # type: ignore[arg-type]
def test_ctrl_c_ends_a_call_that_the_boundary_does_not_answer(call: str) -> None:
    with silent_server() as server:
        url = f"http://127.0.0.1:{server.port}"
        client = BoundaryClient(url, timeout=None, transfer_timeout=None)
        with once(server.heard.is_set, interrupt), pytest.raises(KeyboardInterrupt):
            never_answered(client)[call]()


@pytest.mark.req("BC-46")
@pytest.mark.parametrize("call", ["fetch", "get"])
def test_ctrl_c_ends_a_tls_handshake_that_the_boundary_does_not_answer(call: str, tmp_path: Path) -> None:
    tls = Authority(tmp_path, days=1).issue("hq", "hq", ["127.0.0.1"])
    with silent_server() as server:
        url = f"https://127.0.0.1:{server.port}"
        client = BoundaryClient(url, timeout=None, transfer_timeout=None, tls=tls)
        with once(server.heard.is_set, interrupt), pytest.raises(KeyboardInterrupt):
            never_answered(client)[call]()


@pytest.mark.req("BC-46")
def test_an_object_whose_upload_is_interrupted_is_not_stored(world: BoundaryWorld) -> None:
    left, ended = threading.Event(), threading.Event()

    def data() -> Iterator[bytes]:
        try:
            yield b"first"
            interrupt()
            assert left.wait(30)
            yield b"second"
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        world.admin.put_stream("reports", "one", data())
    left.set()
    assert ended.wait(30)
    with pytest.raises(NotFound):
        world.admin.get("reports", "one")
    assert world.admin.put("reports", "one", b"whole").size == 5


@pytest.mark.req("BC-46")
def test_what_a_call_raises_aside_is_raised_here_and_its_context_is_the_callers(world: BoundaryWorld) -> None:
    names: list[str] = []
    world.server.on_call = names.append
    with pytest.raises(NotFound):
        world.admin.get("reports", "nothing")
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            world.admin.get("reports", "nothing")
        except NotFound as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(raised) == 1
    assert names == ["get", "get"]


@pytest.mark.req("BC-47")
@pytest.mark.parametrize("how", ["signal", "thread"])
def test_stop_ends_a_consumer_that_waits_for_facts_the_boundary_does_not_send(
    world: BoundaryWorld, how: str
) -> None:
    with silent_server() as server:
        world.client = world.new_client(f"http://127.0.0.1:{server.port}", timeout=None)
        consumer = world.consumer()
        before = signal.signal(signal.SIGTERM, lambda *_: consumer.thing.stop())
        stop = consumer.thing.stop if how == "thread" else lambda: os.kill(os.getpid(), signal.SIGTERM)
        try:
            with once(server.heard.is_set, stop):
                consumer.run(world.handler(book), world.database.default)
        finally:
            signal.signal(signal.SIGTERM, before)


@pytest.mark.req("BC-47")
def test_stop_ends_the_wait_for_a_confirmation_and_the_log_says_what_is_open(
    world: BoundaryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(1, 2)
    consumer = world.consumer()
    release = threading.Event()

    def freeze(name: str) -> None:
        if name == "confirm":
            consumer.thing.stop()
            release.wait(30)

    world.server.on_call = freeze
    with caplog.at_level(logging.WARNING, "onceward.boundary"):
        consumer.run(world.handler(book), world.database.default)
    assert not release.is_set()
    release.set()
    assert "stopped before the boundary answered the confirmation of offset 2" in caplog.text
    assert world.effects() == [1, 2]


@pytest.mark.req("BC-47")
def test_a_confirmation_that_the_boundary_answers_after_a_stop_counts(
    world: BoundaryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(1, 2)
    consumer = world.consumer()
    world.server.on_call = lambda name: consumer.thing.stop() if name == "confirm" else None
    consumer.run(world.handler(book), world.database.default)
    assert "stopped before" not in caplog.text
    until(lambda: world.cursor() == 2)


@pytest.mark.req("BC-46")
def test_ctrl_c_ends_a_consumer_that_waits_for_a_silent_boundary(world: BoundaryWorld) -> None:
    with silent_server() as server:
        world.client = world.new_client(f"http://127.0.0.1:{server.port}", timeout=None)
        consumer: Any = world.consumer()
        with once(server.heard.is_set, interrupt), pytest.raises(KeyboardInterrupt):
            consumer.run(world.handler(book), world.database.default)


@pytest.mark.usual("SIGTERM, once")
@pytest.mark.req("BC-57")
@pytest.mark.parametrize(
    ("number", "more"),
    [
        pytest.param(signal.SIGINT, [], id="SIGINT, on and on"),
        pytest.param(signal.SIGTERM, ["--once"], id="SIGTERM, once"),
        pytest.param(signal.SIGTERM, [], id="SIGTERM, on and on", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, ["--once"], id="SIGINT, once", marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_a_forward_whose_source_does_not_answer(
    tmp_path: Path, number: signal.Signals, more: list[str]
) -> None:
    with silent_server() as server:
        place = ["--from", f"http://127.0.0.1:{server.port}", "--to", str(tmp_path / "data"), "--zone", "hq"]
        process = LoggedProcess(
            [sys.executable, "-m", "onceward", "boundary", "forward", *place, *more], tmp_path / "log"
        )
        try:
            until(server.heard.is_set)
            asked = time.monotonic()
            process.process.send_signal(number)
            assert process.process.wait(60) == 0, process.log
            assert time.monotonic() - asked < 10.0, "the client itself would wait for 30 s"
        finally:
            process.kill()
