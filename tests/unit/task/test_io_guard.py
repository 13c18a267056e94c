"""The I/O guard: a task's own I/O is an error that names the call; I/O through injected objects is not."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onceward import Transaction
from onceward.task import io_guard
from onceward.task.settings import EngineSettings
from tests.support.world import ListSource, World, consuming, retry, transactions

RAISE = EngineSettings(io_guard="raise")


def consume(
    world: World, process: Callable[..., Any], settings: EngineSettings = RAISE, **services: Any
) -> str:
    """The message that the exception handler got, or ""."""
    task = world.consumer(
        lambda transaction: process(),
        exception=lambda *_: None,
        source=ListSource(transactions(1)),
        settings=settings,
        services=services,
    )
    world.consume(task)
    return world.errors[0][1].message if world.errors else ""


def open_file(path: str) -> str:
    with open(path) as file:
        return file.read()


@pytest.mark.req("CE-40")
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Path(__file__).read_text(), "open("),
        (lambda: socket.create_connection(("127.0.0.1", 9)), "socket.getaddrinfo("),
        (lambda: socket.socket().connect(("127.0.0.1", 9)), "socket.__new__("),
        (lambda: subprocess.run(["true"], check=True), "subprocess.Popen("),
        (lambda: urllib.request.urlopen("http://127.0.0.1:9"), "urllib.Request("),
    ],
)
def test_io_of_the_tasks_own_is_an_error_that_names_the_call(
    world: World, call: Callable[..., Any], named: str
) -> None:
    message = consume(world, call)
    assert "did its own I/O" in message
    assert named in message
    assert "Move it into a service or connector" in message


@pytest.mark.req("CE-40")
def test_io_through_an_injected_service_is_fine(world: World) -> None:
    class Files:
        def read(self) -> str:
            return open_file(__file__)

    files = Files()
    assert consume(world, lambda: files.read() and None, files=files) == ""


@pytest.mark.req("CE-40")
def test_io_through_an_injected_function_is_fine(world: World) -> None:
    assert consume(world, lambda: open_file(__file__) and None, read=open_file) == ""


@pytest.mark.req("CE-40")
def test_io_through_an_injected_connector_is_fine(world: World) -> None:
    class Wire(ListSource):
        def send(self) -> str:
            return open_file(__file__)

    wire = Wire(transactions(1))
    task = world.consumer(
        lambda _: wire.send() and None, exception=lambda *_: None, source=wire, settings=RAISE
    )
    world.consume(task)
    assert world.errors == []


@pytest.mark.req("CE-40")
def test_an_import_or_a_log_line_in_a_task_is_not_its_io(world: World) -> None:
    def process() -> None:
        sys.modules.pop("wave", None)
        import wave  # noqa: F401

    assert consume(world, process) == ""


@pytest.mark.req("CE-40")
def test_warn_warns_and_lets_it_happen(world: World) -> None:
    with pytest.warns(RuntimeWarning, match="did its own I/O: open"):
        assert consume(world, lambda: open_file(__file__) and None, EngineSettings(io_guard="warn")) == ""


@pytest.mark.req("CE-40")
def test_off_is_off(world: World) -> None:
    assert consume(world, lambda: open_file(__file__) and None, EngineSettings()) == ""


@pytest.mark.req("CE-40")
def test_producing_is_guarded_too(world: World) -> None:
    task = world.producer(lambda _: open_file(__file__) and None, settings=RAISE)
    report = world.produce(task, [Transaction(id="t0")])
    assert report.failed == 1


def test_code_outside_the_task_may_do_as_it_likes(world: World) -> None:
    consume(world, lambda: None)
    assert open_file(__file__)


def test_a_guard_that_is_off_installs_no_hook() -> None:
    script = """
        import sys
        calls = []
        sys.addaudithook_before = sys.addaudithook
        sys.addaudithook = calls.append
        from onceward import ConsumerTask, Transaction
        class Source:
            batches = [[Transaction(id="1")], []]
            def fetch_transactions(self, size):
                return self.batches.pop(0)
        class Task(ConsumerTask):
            def process_transaction(self, transaction):
                return None
        assert Task({"source": Source()}).consume_transactions().succeeded == 1
        assert calls == [], calls
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_an_async_task_may_await_an_injected_service_that_uses_a_thread() -> None:
    class Files:
        async def read(self) -> str:
            return await asyncio.to_thread(open_file, __file__)

    world = World("asyncio")
    files = Files()

    async def process(task: Any, transaction: Transaction) -> None:
        await task.services["files"].read()

    task = world.consumer(source=ListSource(transactions(1)), settings=RAISE, services={"files": files})
    type(task).process_transaction = process
    assert world.consume(task).succeeded == 1


@pytest.mark.req("CE-40")
def test_io_of_the_tasks_own_is_not_retried(world: World) -> None:
    task = world.consumer(
        lambda _: open_file(__file__) and None, source=ListSource(transactions(1)), settings=RAISE
    )
    report = world.consume(task, consuming(process=retry(3)))
    assert (report.failed, report.retries) == (1, 0)


def test_as_the_interpreter_ends_the_hook_of_a_cleared_module_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WATCHED", "_watched", "_is_own", "sys"):
        monkeypatch.setattr(io_guard, name, None)
    io_guard._audit("open", ("file", "r", 0))
    io_guard._audit("compile", ())
