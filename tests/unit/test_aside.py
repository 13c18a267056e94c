"""Calls that their caller can leave."""

from __future__ import annotations

import os
import signal
import threading
from contextvars import ContextVar

import pytest

from onceward._process.aside import Stopped, call_aside
from onceward._process.stop import BlockingStop
from tests.support.silence import once

FLAG: ContextVar[str] = ContextVar("flag", default="none")


@pytest.mark.req("BC-46")
def test_the_main_thread_calls_aside_in_its_context_and_gets_result_or_error() -> None:
    FLAG.set("ours")
    assert call_aside(lambda: (FLAG.get(), threading.current_thread().name)) == ("ours", "onceward-aside")
    with pytest.raises(ZeroDivisionError):
        call_aside(lambda: 1 / 0)


@pytest.mark.req("BC-46")
def test_other_threads_call_in_place_unless_a_stop_can_end_the_wait() -> None:
    seen: list[str] = []

    def body() -> None:
        name = threading.current_thread().name
        seen.append(call_aside(lambda: threading.current_thread().name).replace(name, "here"))
        seen.append(call_aside(lambda: threading.current_thread().name, stop=BlockingStop()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == ["here", "onceward-aside"]


@pytest.mark.req("BC-47")
def test_a_stop_leaves_the_call_after_its_grace_and_an_answer_within_it_counts() -> None:
    stop, begun, release = BlockingStop(), threading.Event(), threading.Event()

    def wait() -> str:
        begun.set()
        release.wait(30)
        return "answer"

    with once(begun.is_set, stop.request), pytest.raises(Stopped):
        stop.leave(wait)
    begun.clear()
    with once(begun.is_set, release.set):
        assert stop.leave(wait, grace=60.0) == "answer"
    with pytest.raises(Stopped):
        stop.leave(threading.Event().wait, 30)


@pytest.mark.req("BC-46")
def test_a_forked_child_has_helpers_of_its_own() -> None:
    assert call_aside(lambda: 1) == 1
    child = os.fork()
    if not child:
        os._exit(call_aside(lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.req("BC-46")
def test_a_signal_handler_that_raises_ends_the_wait() -> None:
    begun, release = threading.Event(), threading.Event()

    def leave(*_: object) -> None:
        raise SystemExit(3)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with once(begun.is_set, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit):
            call_aside(lambda: (begun.set(), release.wait(30)))
    finally:
        signal.signal(signal.SIGTERM, before)
        release.set()
