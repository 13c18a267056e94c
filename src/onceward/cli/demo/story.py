"""The demo from its beginning to its end: produce, forward, cut, heal, kill, start again, drain, redrive, balance."""

from __future__ import annotations

import time
from collections import Counter

from onceward.cli.demo.acts import cut_the_link, kill_a_worker, redrive_one
from onceward.cli.demo.balance import strike_balance
from onceward.cli.demo.line import running
from onceward.cli.demo.orders import make_messages, make_orders
from onceward.cli.demo.result import Result
from onceward.cli.demo.screen import Screen
from onceward.cli.demo.setup import Setup
from onceward.cli.demo.watch import Watch

PART_BEFORE_THE_CUT = 0.4
"""Of all messages: what is sent before the link is cut. The rest is sent meanwhile."""


def tell(setup: Setup, screen: Screen) -> Result:
    """Run the whole demo. Raises `ChildDied` when a process does so without being killed by us."""
    began = time.monotonic()
    orders = make_orders(setup.orders, setup.seed)
    messages = make_messages(orders, setup.seed)
    screen.begin(len(orders), len(messages))
    with running(setup, messages, int(len(messages) * PART_BEFORE_THE_CUT)) as line:
        for child in (line.zones.shop, line.zones.warehouse, *line.crew.workers):
            screen.tell(f"{child.name} started (pid {child.pid})")
        watch = Watch(line, screen)
        cut = cut_the_link(watch)
        crash = kill_a_worker(watch)
        redriven = redrive_one(watch)
        reports = line.crew.stop()
        screen.show(line.books.progress())
        return Result(
            balance=strike_balance(orders, len(messages), line.books.evidence()),
            fates=Counter(str(order.fate) for order in orders),
            cut=cut,
            crash=crash,
            redriven=redriven,
            came_again=0 if crash is None else line.books.journal.came_again(crash.process),
            recognised=sum(report.duplicates for report in reports),
            retries=sum(report.retries for report in reports),
            timeouts=sum(report.timed_out for report in reports),
            dead_letters=line.books.letters_by_category(),
            packed_by=line.books.ledger.shares(),
            seconds=round(time.monotonic() - began, 1),
        )
