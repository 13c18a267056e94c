"""A call in a fork, which may die of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from onceward._process import child
from onceward._process.child import ChildDied, call_in_child
from onceward.errors import ConfigurationError, OncewardError
from tests.support.sqlite_locks import LOCKS, calls_in, held, held_for_a_moment, use_sqlite


def test_what_it_returns_or_raises_comes_back() -> None:
    here = os.getpid()
    assert call_in_child(lambda: (os.getppid(), "x" * 200_000), 30) == (here, "x" * 200_000)

    def fails() -> Any:
        raise ConfigurationError("no")

    with pytest.raises(ConfigurationError, match="no"):
        call_in_child(fails, 30)

    def fails_strangely() -> Any:
        class Odd(Exception): ...

        raise Odd("only here")

    with pytest.raises(OncewardError, match="Odd: only here"):
        call_in_child(fails_strangely, 30)


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_of_sqlite_that_a_thread_held_at_the_fork_does_not_hang_it(lock: str, tmp_path: Path) -> None:
    with held_for_a_moment(lock):
        assert call_in_child(lambda: use_sqlite(tmp_path), 5) == "used"
    assert calls_in(tmp_path) == 1, "it ran in a child that was given up"


def test_a_lock_of_sqlite_that_is_always_held_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "USABLE_WITHIN", (0.1, 0.1))
    with held("memory"), pytest.raises(ChildDied, match=r"could not begin: .* a lock of SQLite is held here"):
        call_in_child(lambda: None, 5)


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(3), "ended with exit code 3"),
        (lambda: time.sleep(60), "did not end within 0.2 s"),
    ],
)
def test_a_process_that_dies_is_only_reported(function: Any, how: str) -> None:
    with pytest.raises(ChildDied, match=how):
        call_in_child(function, 0.2 if "0.2" in how else 30)


MANY_FILES = """
import os, resource
from onceward._process.child import call_in_child

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
wanted = 2048 if hard == resource.RLIM_INFINITY else min(hard, 2048)
resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
last = 0
try:
    while last < 1100:
        last = os.open(os.devnull, os.O_RDONLY)
except OSError:  # as many as this machine allows
    os.close(last)
    os.close(last - 1)
print(call_in_child(lambda: "done", 30))
"""


def test_it_works_in_a_process_with_thousands_of_open_files() -> None:
    # In a process of its own, so it does not matter how many files other tests have open.
    ran = subprocess.run(
        [sys.executable, "-c", MANY_FILES], check=False, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
