"""Kills and pauses workers and restarts servers while orders run, and counts what was lost or doubled.

    python -m tests.campaign                                                 six combinations, 3,000 orders each
    python -m tests.campaign --source redis --database postgresql --mode asyncio --kills 100
    python -m tests.campaign --chain redis --kills 60        three services: order, charge, ship
    python -m tests.campaign --limits --kills 30             a million starts, counted in the database
    python -m tests.campaign --order --events 20000          a thousand keys, each in its order

Every order goes to two consumers: one writes through its session, one calls a provider that honors keys.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.campaign.chain.campaign import attack
from tests.campaign.chain.premises import WIRES
from tests.campaign.field import CONSUMERS, Combination, Field, field
from tests.campaign.limits.campaign import attack_limits
from tests.campaign.order import ORDERED, attack_order
from tests.campaign.orders import Order, make_orders
from tests.campaign.tally import Tally, count, unfinished
from tests.campaign.trouble import Trouble

SOURCES, DATABASES, MODES = ("redis", "sqlite"), ("postgresql", "sqlite"), ("threads", "asyncio")
ENDED = (0, 128 + signal.SIGTERM)
"""Exit codes of a run that was stopped. The second: a worker that was just woken up had stale work, and cut it off."""
PATIENCE = 300.0
"""Seconds after the last act in which everything must end."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.limits:
        fine = attack_limits(starts=options.starts, kills=options.kills, seed=options.seed)
        failed: list[Any] = [] if fine else ["limits"]
    elif options.order is not None:
        failed = [source for source in options.order or ORDERED if not _attack_order(source, options)]
    elif options.chain:
        failed = [wire for wire in options.chain if not _attack(wire, options)]
    else:
        failed = [what for what in _chosen(options) if not _campaign(what, options)]
    fine_words = (
        "Nothing above its limit, no slot leaked." if options.limits else "Nothing lost, nothing doubled."
    )
    print(f"\n{fine_words}" if not failed else f"\nFailed: {'; '.join(map(str, failed))}")
    return 1 if failed else 0


def _attack(wire: str, options: argparse.Namespace) -> bool:
    return attack(
        wire,
        orders=options.events,
        kills=options.kills,
        pauses=options.pauses,
        restarts=options.restarts,
        seconds=options.seconds,
        processes=options.processes,
        seed=options.seed,
    )


def _attack_order(source: str, options: argparse.Namespace) -> bool:
    return attack_order(source, events=options.events, kills=options.kills, seed=options.seed)


def _chosen(options: argparse.Namespace) -> list[Combination]:
    """What the options ask for. A SQLite queue with PostgreSQL is rare, so it must be asked for."""
    return [
        Combination(source, database, mode)
        for source in SOURCES
        for database in DATABASES
        for mode in MODES
        if options.source in (None, source)
        and options.database in (None, database)
        and options.mode in (None, mode)
        and ((source, database) != ("sqlite", "postgresql") or (options.source and options.database))
    ]


def _campaign(what: Combination, options: argparse.Namespace) -> bool:
    chance = random.Random(options.seed)
    orders = make_orders(options.events // len(CONSUMERS), chance)
    print(f"\n{what}: {options.events} orders, seed {options.seed}", flush=True)
    with field(what, options.processes) as made:
        trouble = Trouble(made, chance, kills=options.kills, pauses=options.pauses, restarts=options.restarts)
        made.start()
        sender = threading.Thread(target=_send, args=(made, orders, options.seconds))
        sender.start()
        try:
            trouble.make(options.seconds)
        except BaseException:
            _keep(made, what)
            raise
        sender.join()
        finished, seconds = _wait(made, orders)
        tally = count(made, orders, finished=finished)
        code = made.stop()
        balance, text = made.balance()
        acts = ", ".join(f"{count} {act}" for act, count in sorted(trouble.done.items()))
        print(f"  {acts}; finished {seconds:.1f} s after the last; exit code {code}; balance {balance}")
        _print(tally)
        is_clean = tally.is_clean and finished and code in ENDED and balance == 0
        if not is_clean:
            print(text)
            _keep(made, what)
    return is_clean


def _send(made: Field, orders: Sequence[Order], seconds: float) -> None:
    """Over the whole time, so there is always something in flight. Copies follow a while after their message."""
    size = max(len(orders) // 50, 1)
    messages = [order.messages[0] for order in orders]
    copies = [each for order in orders for each in order.messages[1:]]
    for start in range(0, len(messages), size):
        for consumer in CONSUMERS:
            made.send(consumer, messages[start : start + size])
        time.sleep(seconds / 60)
    for consumer in CONSUMERS:
        made.send(consumer, copies)


def _wait(made: Field, orders: Sequence[Order]) -> tuple[bool, float]:
    """Wait until every message is done. Returns whether that happened, and after how many seconds."""
    began = time.monotonic()
    while left := unfinished(made, orders):
        if time.monotonic() - began > PATIENCE:
            return False, time.monotonic() - began
        print(f"\r  {left} left  ", end="", flush=True)
        time.sleep(0.5)
    print("\r", end="")
    return True, time.monotonic() - began


def _print(tally: Tally) -> None:
    print("  " + ", ".join(f"{name.replace('_', ' ')} {len(some)}" for name, some in tally._asdict().items()))
    for name, some in tally._asdict().items():
        if some:
            print(f"    {name.replace('_', ' ')}: {', '.join(some[:20])}")


def _keep(made: Field, what: Combination) -> None:
    kept = Path(f"campaign-{'-'.join(what)}-{int(time.time())}")
    shutil.copytree(made.directory, kept)
    print(f"  its files are in {kept}", flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--source", choices=SOURCES)
    parser.add_argument(
        "--chain", choices=WIRES, action="append", help="attack order → charge → ship on this wire instead"
    )
    parser.add_argument("--limits", action="store_true", help="attack limits instead")
    parser.add_argument(
        "--order", nargs="*", choices=ORDERED, help="attack order by key instead, on these sources or all"
    )
    parser.add_argument("--starts", type=int, default=1_000_000, help="of limits")
    parser.add_argument("--database", choices=DATABASES)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--events", type=int, default=3000, help="per combination, both consumers together")
    parser.add_argument(
        "--kills", type=int, default=40, help="with -9; a tenth of them all processes at once"
    )
    parser.add_argument("--pauses", type=int, default=10, help="of a worker, mostly longer than its leases")
    parser.add_argument("--restarts", type=int, default=3, help="of each server, with -9")
    parser.add_argument("--seconds", type=float, default=60, help="over which to spread all that")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
