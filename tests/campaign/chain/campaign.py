"""A campaign against the chain of order, charge and ship."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

from tests.campaign.chain.count import ChainTally, count, unfinished
from tests.campaign.chain.premises import Premises, premises
from tests.campaign.trouble import Trouble

CUSTOMERS = 50
APPS = ("orders", "charging", "shipping")
ENDED = (0, 128 + signal.SIGTERM)
PATIENCE = 300.0


def attack(
    wire: str,
    *,
    orders: int,
    kills: int,
    pauses: int,
    restarts: int,
    seconds: float,
    processes: int,
    seed: int,
) -> bool:
    """Place so many orders while all that happens. Returns whether nothing is wrong, and prints what is."""
    customers = min(CUSTOMERS, orders)
    print(f"\norder → charge → ship on {wire}: {orders} orders, seed {seed}", flush=True)
    with premises(wire, processes) as made:
        made.prepare(customers, orders // customers, seconds)
        trouble = Trouble(made, random.Random(seed), kills=kills, pauses=pauses, restarts=restarts)
        made.start()
        try:
            trouble.make(seconds)
        except BaseException:
            _keep(made)
            raise
        finished, took = _wait(made)
        codes = made.stop()
        balances = {app: made.balance(app) for app in APPS}
        tally, copies = count(made)
        acts = ", ".join(f"{number} {act}" for act, number in sorted(trouble.done.items()))
        verdicts = ", ".join(f"{app} {code}" for app, (code, _) in balances.items())
        print(f"  {acts}; finished {took:.1f} s after the last; exit codes {codes}; balance {verdicts}")
        _print(tally, copies)
        is_clean = (
            tally.is_clean
            and finished
            and all(code in ENDED for code in codes)
            and not any(code for code, _ in balances.values())
        )
        if not is_clean:
            print("\n".join(text for _, text in balances.values()))
            _keep(made)
    return is_clean


def _wait(made: Premises) -> tuple[bool, float]:
    began = time.monotonic()
    while not made.keep_desk() or (left := unfinished(made)):
        if time.monotonic() - began > PATIENCE:
            print(f"  {left} left after {PATIENCE:.0f} s")
            return False, time.monotonic() - began
        time.sleep(0.5)
    return True, time.monotonic() - began


def _print(tally: ChainTally, copies: int) -> None:
    wrong = ", ".join(f"{name} {len(some)}" for name, some in tally._asdict().items())
    print(f"  {wrong}; {copies} copies with the same id")
    for name, some in tally._asdict().items():
        if some:
            print(f"    {name}: {', '.join(some[:20])}")


def _keep(made: Premises) -> None:
    kept = Path(f"campaign-chain-{made.what}-{int(time.time())}")
    shutil.copytree(made.directory, kept)
    print(f"  its files are in {kept}", flush=True)
