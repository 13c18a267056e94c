"""Runs are stopped in the middle of their work, one after another: nothing is lost, and nothing is done twice.

Two run at a time, as when a new release takes over from the old one. Every run starts a new process, so the suite has
only a few; `ONCEWARD_TEST_SHUTDOWNS=50 pytest tests/crash/run/test_shutdown.py` is the long form.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.crash.run.shutdowns import Shutdowns

ROUNDS = int(os.environ.get("ONCEWARD_TEST_SHUTDOWNS", "4"))


@pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.long), "redis"])
def test_a_stop_under_load_loses_nothing_and_doubles_nothing(
    kind: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutdowns = Shutdowns(tmp_path, redis_url if kind == "redis" else None)
    monkeypatch.setenv("RUN_SOURCES", " ".join(shutdowns.sources))
    shutdowns.run(ROUNDS)
    assert set(shutdowns.codes) == {0}
    assert shutdowns.effects() == shutdowns.sent(), "each message takes effect once"
    assert shutdowns.calls() == shutdowns.sent(), "and the handler was called once for each"
