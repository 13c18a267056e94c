"""Runs rounds of the soak test for some minutes, each in a process of its own.

    python -m tests.soak [--minutes 20] [--seed FIRST] [--jobs 2]

Prints the seed of every round that hangs or breaks the model; `python -m tests.soak.round SEED` repeats it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count

HANG = 120.0
"""Seconds after which a round counts as hung; most take a few."""


def run_round(seed: int) -> tuple[int, dict[str, int], str]:
    """Return the seed, what the round did, and what went wrong, if anything."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.soak.round", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=HANG)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            return seed, {}, f"hung for {HANG:g} s\n{err[-6000:]}"
    lines = out.splitlines()
    if process.returncode or not lines:
        return seed, {}, f"exit code {process.returncode}\n{out[-3000:]}\n{err[-6000:]}"
    return seed, json.loads(lines[-1]), ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    end = time.monotonic() + options.minutes * 60
    seeds = count(options.seed)
    totals: Counter[str] = Counter()
    failures: list[int] = []
    rounds = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running: set[Future[tuple[int, dict[str, int], str]]] = set()
        while running or time.monotonic() < end:
            while len(running) < options.jobs and time.monotonic() < end:
                running.add(pool.submit(run_round, next(seeds)))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                seed, did, problem = each.result()
                rounds += 1
                totals.update(did)
                if problem:
                    failures.append(seed)
                    print(f"\nround {seed} failed: {problem}", flush=True)
            left = max(0.0, end - time.monotonic())
            print(f"\r{rounds} rounds, {len(failures)} failed, {left / 60:.1f} min left ", end="", flush=True)
    print(
        f"\n{rounds} rounds from seed {options.seed}: "
        + ", ".join(f"{n} {what}" for what, n in totals.items())
    )
    if failures:
        print(f"{len(failures)} failed: {failures}; repeat one with: python -m tests.soak.round SEED")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
