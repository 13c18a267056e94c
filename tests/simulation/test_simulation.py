"""The simulation finds what it must find, nothing else, and the same every time. `make simulate` runs more seeds."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.simulation.__main__ import WORLDS, find, run_one, run_share
from tests.simulation.bugs import PLANTED
from tests.simulation.consumers import ConsumerWorld
from tests.simulation.loop import quiet
from tests.support import ROOT

SEEDS = {"ConsumerWorld": 20, "FactWorld": 20, "LinkWorld": 20}
FEWER = 8
"""Seeds of the other worlds."""
FIRST = {
    "claim not checked": 15, "commit before effect": 17, "dedup by day": 6, "fence ignored": 65,
    "jetstream: fence ignored": 49, "jetstream: lease not extended": 4, "redis: commit before effect": 3,
    "redis: lease not extended": 1,
    "relay: fence ignored": 157, "relay: late commits skipped": 11, "relay: lease not extended": 5,
    "relay: order ignored": 6, "threads: claim not checked": 7, "threads: commit before effect": 76,
}  # fmt: skip
"""Seeds that found it, to begin with: the others from 0. `make simulate PLANTED=1` begins all with 0."""
SAME = 7
"""A seed with crashes, losses and jumps."""


@pytest.fixture(autouse=True)
def without_logs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.req("ST-10")
@pytest.mark.req("ST-14")
@pytest.mark.req("ST-15")
@pytest.mark.req("ST-16")
@pytest.mark.req("ST-17")
@pytest.mark.req("ST-18")
@pytest.mark.parametrize("world", sorted(WORLDS))
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.long)])
def test_every_interleaving_keeps_the_model(world: str, times: int) -> None:
    seeds = SEEDS.get(world, FEWER) * times
    share = run_share(world, 0, seeds)

    assert share.failure == ""
    assert share.runs == seeds


@pytest.mark.req("ST-11")
@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_bug_is_found(name: str) -> None:
    seed, why = find(name, FIRST.get(name, 0))

    assert seed >= 0
    assert f"--seed {seed} " in why


@pytest.mark.req("ST-10")
def test_a_failing_seed_fails_again_with_the_same_readable_history() -> None:
    seed, why = find("ack before commit")
    _, again = find("ack before commit", seed)

    assert why == again
    assert "was acknowledged before its effect was committed" in why.splitlines()[0]
    assert any("gets message 1" in line for line in why.splitlines())
    assert why.splitlines()[-1].startswith("repeat it with: python -m tests.simulation --world ConsumerWorld")


@pytest.mark.req("ST-10")
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    command = [sys.executable, "-m", "tests.simulation.test_simulation"]
    other = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert other.stdout.strip() == digest()


def digest() -> str:
    with quiet():
        lines = [line for world in WORLDS.values() for line in world(SAME).run().lines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@pytest.mark.req("ST-10")
def test_a_process_that_fails_for_another_reason_is_not_taken_for_a_success() -> None:
    class Wrong(ConsumerWorld):
        async def _work(self, process: object) -> None:
            raise ZeroDivisionError

    with quiet():
        failure, _ = run_one(Wrong, 0)

    assert "ZeroDivisionError" in failure


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(digest())
