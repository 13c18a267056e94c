"""A child that user code forks, and that comes back, ends there: it is no second worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

ENDED = {"raises": 1, "returns": 0, "exits": 3, "interrupts": 1, "leaves": 4, "executes": 0, "works": 0}
IN_A_SESSION = ENDED | {"returns": 1}
"""A child that leaves the block of a session, or goes on to an effect, gets an error: both belong to its parent."""
DONE = {"ready": 0, "leased": 0, "delayed": 0, "dead": 0}


@pytest.mark.req("RN-09")
@pytest.mark.parametrize("mode", ["threads", pytest.param("asyncio", marks=pytest.mark.long)])
def test_a_forked_child_that_comes_back_ends_and_others_are_left_alone(tmp_path: Path, mode: str) -> None:
    program = subprocess.run(
        [sys.executable, "-m", "tests.support.forks", mode, tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    [line] = program.stdout.splitlines()  # of the parent, and of nobody else
    output = json.loads(line)
    assert output["ended"] == dict.fromkeys(
        ("process", "success", "exception", "effect", "loop", "service"), ENDED
    ) | {
        "inbox": IN_A_SESSION,
        "session": IN_A_SESSION,
    }
    assert output["counts"] == dict.fromkeys(("process", "success", "inbox", "effect", "session"), DONE) | {
        "exception": DONE | {"dead": len(ENDED)}
    }
    assert (
        "  | RuntimeError: an error of the \\x1b]0;child\n  | onceward: forged\nonceward: process"
        in program.stderr
    )
    assert "ends here: it must not go on as a second worker; end it with os._exit" in program.stderr
    assert (
        "effect 'call' was not called: this process is a fork of the one that has the event" in program.stderr
    )
    assert "this session belongs to the process that this one was forked from" in program.stderr
