"""Threads and event loops of one process let a suspect run alone, whichever of them it is in."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from onceward._sync import run_blocking
from onceward.inbox import attempts
from onceward.inbox.attempts import AsyncGate, BlockingGate, Company, everyone
from tests.support.wait import until, until_async

pytestmark = pytest.mark.req("CC-059")


def test_one_in_asyncio_waits_for_a_thread() -> None:
    thread, loop = BlockingGate(), AsyncGate()
    may_leave, inside = threading.Event(), threading.Event()

    def work() -> None:
        assert run_blocking(thread.enter(Company.ALL))
        inside.set()
        may_leave.wait(30)
        thread.leave()

    async def run_alone() -> None:
        assert await loop.enter(Company.NONE)
        assert (everyone.inside, everyone.alone) == (1, True)
        loop.leave()

    async def meet() -> None:
        await until_async(inside.is_set)
        alone = asyncio.create_task(run_alone())
        await until_async(lambda: everyone.waiting)
        assert not alone.done()
        may_leave.set()
        await alone

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(work)
        asyncio.run(meet())
        running.result(30)
    assert (everyone.inside, everyone.alone, everyone.waiting) == (0, False, 0)


def test_a_thread_waits_for_one_that_is_alone_in_another_gate() -> None:
    first, second = BlockingGate(), BlockingGate()
    assert run_blocking(first.enter(Company.NONE))

    def work() -> bool:
        entered = run_blocking(second.enter(Company.ALL))
        second.leave()
        return bool(entered)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(work)
        until(lambda: everyone.changed._waiters)  # type: ignore[attr-defined]
        assert not waiting.done()
        first.leave()
        assert waiting.result(30)
    assert everyone.inside == 0


def test_one_that_cannot_be_alone_gives_up_and_lets_the_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PATIENCE", 0.05)
    gate, other = BlockingGate(), BlockingGate()
    assert run_blocking(gate.enter(Company.ALL))
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: run_blocking(other.enter(Company.NONE))).result(30) is False
        assert threads.submit(
            lambda: run_blocking(other.enter(Company.ALL)) and other.leave() is None
        ).result(30)
    gate.leave()
    assert (everyone.inside, everyone.waiting) == (0, 0)
