"""A thread that emits onceward's log lines, so a log handler that blocks or fails holds up nothing else.

Log handlers are user code: one may raise, wait for a dead server, or need a lock that a stuck attempt holds. Code that
logs waits until its line is out, so lines keep their order, but not for longer than `PATIENCE`. After that lines queue
up, and nothing waits until the handlers have caught up.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from onceward._text import printable_lines
from onceward.telemetry.redaction import format_error

_log = logging.getLogger("onceward")

PATIENCE = 1.0
"""Seconds to wait for a line."""
MOST = 10_000
"""Lines that may queue up behind a handler that blocks. More are dropped and counted."""

Job = Callable[[], object]


class LogThread:
    """Runs jobs one after another in a daemon thread that starts with the first."""

    def __init__(self) -> None:
        self.dropped = 0
        """Jobs dropped since the thread last caught up."""
        self._jobs: queue.SimpleQueue[tuple[Job, threading.Lock]] = queue.SimpleQueue()
        self._behind = False
        self._starting = threading.Lock()
        self._ident: int | None = None

    def post(self, job: Job) -> None:
        """Run it soon. Never waits."""
        self._put(job)

    def run(self, job: Job) -> None:
        """Run it and wait until it is done, unless this thread is behind."""
        if threading.get_ident() == self._ident:
            run_safely(job)  # a log handler that uses onceward
            return
        done = self._put(job)
        if done is not None and not self._behind and not done.acquire(timeout=PATIENCE):
            self._behind = True

    def flush(self) -> None:
        """Wait until what was posted before is done, unless this thread is behind."""
        if self._ident is not None:
            self.run(_nothing)

    def _put(self, job: Job) -> threading.Lock | None:
        if sys.is_finalizing():
            run_safely(job)  # no other thread runs any more, and before Python 3.12 starting one never ends
            return None
        if self._jobs.qsize() >= MOST:
            self.dropped += 1
            return None
        done = threading.Lock()
        done.acquire()
        self._jobs.put((job, done))
        if self._ident is None:
            self._start()
        return done

    def _start(self) -> None:
        with self._starting:
            if self._ident is not None:
                return
            thread = threading.Thread(target=self._work, name="onceward-log", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter is shutting down
                with suppress(queue.Empty):
                    self._work_off(*self._jobs.get_nowait())
                return
            self._ident = thread.ident

    def _work(self) -> None:
        self._ident = threading.get_ident()
        while True:
            self._work_off(*self._jobs.get())
            if self._behind and self._jobs.empty():
                self._behind = False
                run_safely(self._report_dropped)

    def _report_dropped(self) -> None:
        dropped, self.dropped = self.dropped, 0
        if dropped:
            _log.warning("logging was blocked; %d lines were dropped", dropped)

    def _work_off(self, job: Job, done: threading.Lock) -> None:
        run_safely(job)
        done.release()


def _nothing() -> None:
    """Mark a place in the queue."""


_reported: set[type[BaseException]] = set()


def run_safely(job: Job) -> None:
    """Run it. What it raises is printed once for each type; only a Ctrl-C of the user is raised."""
    try:
        job()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        if type(error) in _reported:
            return
        _reported.add(type(error))
        # Not `logging`, which has just failed.
        with suppress(Exception):
            sys.stderr.write("onceward could not log a line; the work it reports on goes on:\n")
            sys.stderr.write(f"{printable_lines(format_error(error))}\n")


log_thread = LogThread()
os.register_at_fork(after_in_child=log_thread.__init__)  # type: ignore[misc]  # the thread is not in the child
