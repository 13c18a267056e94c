"""Runs simulations, each from its own seed, and prints the history of the first that breaks the model.

    python -m tests.simulation [--seeds 1000] [--seed FIRST] [--world ConsumerWorld] [--jobs 2] [--planted]

A seed always gives the same run. `--planted` plants known bugs instead, and shows when each is found.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

from tests.simulation.bugs import PLANTED
from tests.simulation.consumers import ConsumerWorld
from tests.simulation.facts import FactWorld
from tests.simulation.history import Broken
from tests.simulation.links import LinkWorld
from tests.simulation.loop import quiet
from tests.simulation.relays import RelayWorld
from tests.simulation.remote import JetStreamWorld, PostgreSqlWorld, RedisWorld, ThreadWorld
from tests.simulation.simulation import Simulation

_WORLDS = (
    ConsumerWorld,
    FactWorld,
    JetStreamWorld,
    LinkWorld,
    PostgreSqlWorld,
    RedisWorld,
    RelayWorld,
    ThreadWorld,
)
WORLDS: dict[str, type[Simulation]] = {each.__name__: each for each in _WORLDS}
SHARE = 20
"""Seeds that a process takes at once."""
LIMIT = 60.0
"""Seconds of CPU within which each planted bug must be found: what it takes on a quiet machine."""


class Share(NamedTuple):
    runs: int
    steps: int
    failure: str


def run_share(world: str, first: int, number: int) -> Share:
    """Run these seeds until one breaks the model."""
    logging.disable(logging.CRITICAL)  # thousands of lines about faults that are meant to happen
    total = 0
    with quiet():
        for runs, seed in enumerate(range(first, first + number), 1):
            failure, steps = run_one(WORLDS[world], seed)
            total += steps
            if failure:
                return Share(runs, total, failure)
    return Share(number, total, "")


def run_one(world: type[Simulation], seed: int) -> tuple[str, int]:
    """Return what broke the model, if anything, and the number of steps. Nothing else of the run stays."""
    simulation = world(seed)
    try:
        simulation.run()
    except Broken as broken:
        return str(broken), simulation.loop.steps
    return "", simulation.loop.steps


def search(worlds: list[str], first: int, seeds: int, jobs: int) -> int:
    began = time.monotonic()
    runs = steps = 0
    failures: list[str] = []
    with ProcessPoolExecutor(jobs) as pool:
        shares = [
            pool.submit(run_share, world, seed, min(SHARE, first + seeds - seed))
            for seed in range(first, first + seeds, SHARE)
            for world in worlds
        ]
        for ended in as_completed(shares):
            share = ended.result()
            runs, steps = runs + share.runs, steps + share.steps
            if share.failure:
                failures.append(share.failure)
                pool.shutdown(wait=False, cancel_futures=True)
                break
            print(f"\r{runs} runs, {steps} steps ", end="", file=sys.stderr, flush=True)
    minutes = (time.monotonic() - began) / 60
    print(file=sys.stderr)
    for failure in failures:
        print(failure)
    print(
        f"{runs} interleavings from seed {first} in {minutes:.1f} min, {runs / minutes:.0f} per minute, with {steps} "
        f"steps in all: {'BROKEN' if failures else 'all hold'}"
    )
    return 1 if failures else 0


def find(name: str, first: int = 0, limit: float = LIMIT) -> tuple[int, str]:
    """Plant a bug, and return the first seed that finds it, and what it says. The seed is -1 if none does in time."""
    plant, world = PLANTED[name]
    until = time.process_time() + limit
    seed = first
    with plant(), quiet():
        while time.process_time() < until:
            failure, _ = run_one(world, seed)
            if failure:
                return seed, failure
            seed += 1
    return -1, ""


def find_all(first: int) -> int:
    logging.disable(logging.CRITICAL)
    missed = 0
    for name in PLANTED:
        began = time.monotonic()
        seed, why = find(name, first)
        took = time.monotonic() - began
        missed += seed < 0
        said = why.splitlines()[0] if why else "NOT FOUND"
        print(f"{name:<29} {took:5.1f} s  {said}", flush=True)
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--world", choices=sorted(WORLDS), help="only this one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--planted", action="store_true", help="plant known bugs, and show when each is found"
    )
    options = parser.parse_args()
    if options.planted:
        return find_all(options.seed)
    return search(
        [options.world] if options.world else sorted(WORLDS), options.seed, options.seeds, options.jobs
    )


if __name__ == "__main__":
    sys.exit(main())
