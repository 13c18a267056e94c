"""The demo from its beginning to its end: produce, forward, cut, heal, kill, start again, drain, redrive, balance."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter

from onceward.deadletters import DeadLetter, Filter, Rca, Status
from onceward.demo import ledger
from onceward.demo.balance import strike_balance
from onceward.demo.crew import Worker
from onceward.demo.line import Line, Watch, running
from onceward.demo.orders import NEW_ARTICLE, make_messages, make_orders
from onceward.demo.screen import Crash, Cut, Progress, Redriven, Result, Screen
from onceward.demo.setup import CONSUMER, Setup

# The turning points of the demo: the link is cut, a worker is killed, a dead letter is redriven.
#
# Each waits for its moment, and returns None if that never came.


HUNT = 0.02
"""Seconds between two while a worker is to be caught in the middle of a batch."""
CUT_SECONDS = 3.0


# ── the link ────────────────────────────────────────────────────────────────────────────────────────────


def cut_the_link(watch: Watch) -> Cut | None:
    """Cut it when a quarter of the facts is through, and heal it when both zones have gone on for a while."""
    line, screen = watch.line, watch.screen
    if not watch.until(lambda now: now.forwarded >= line.setup.orders // 4):
        line.sending.go_on()
        return None
    line.wire.cut()
    cut_at, before = time.monotonic(), watch.look()
    screen.tell(f"link cut: {before.forwarded:,} facts are through", bad=True)
    line.sending.go_on()
    went_on = watch.until(
        lambda now: (
            time.monotonic() - cut_at >= CUT_SECONDS
            and now.appended > before.appended
            and (now.applied > before.applied or now.confirmed == now.forwarded)
        )
    )
    line.wire.heal()
    if not went_on:
        return None
    cut = Cut(
        seconds=round(time.monotonic() - cut_at, 1),
        appended=watch.now.appended - before.appended,
        applied=watch.now.applied - before.applied,
        waiting=watch.now.appended - watch.now.forwarded,
    )
    screen.tell(
        f"link healed after {cut.seconds:g} s: meanwhile the shop took {cut.appended:,} orders, the warehouse shipped "
        f"{cut.applied:,}, and {cut.waiting:,} facts wait"
    )
    return cut


# ── the kill ────────────────────────────────────────────────────────────────────────────────────────────


def kill_a_worker(watch: Watch) -> Crash | None:
    """From half-way on, kill the first worker found in the middle of a batch, and start it again."""
    crashes: list[Crash] = []

    def is_killed(now: Progress) -> bool:
        if now.applied >= watch.line.setup.orders // 2:
            crashes.extend(_kill_one(watch))
        return bool(crashes) or is_drained(watch.line, now)

    watch.until(is_killed, HUNT)
    return crashes[0] if crashes else None


def is_drained(line: Line, now: Progress) -> bool:
    """Whether the workers are done with every order."""
    return now.confirmed == now.forwarded == now.appended == line.setup.orders


def _kill_one(watch: Watch) -> list[Crash]:
    """None was at the right moment: nobody."""
    for worker in watch.line.crew.workers:
        crash = _killed_at_the_worst_moment(worker, watch.line)
        if crash is not None:
            watch.screen.tell(
                f"{crash.worker} killed with -9: it held {crash.held:,} orders, {crash.applied_but_held:,} of them "
                "shipped and not acknowledged",
                bad=True,
            )
            again = watch.line.crew.restart(worker)
            watch.screen.tell(f"{again.name} started again (pid {again.pid})")
            return [crash]
    return []


def _killed_at_the_worst_moment(worker: Worker, line: Line) -> Crash | None:
    """It holds orders that it has shipped and not acknowledged, and others that are not shipped."""
    held: set[str] = set()
    applied: set[str] = set()

    def now() -> bool:
        try:
            held.update(line.books.journal.held_by(worker.identity))
            applied.update(held & line.books.ledger.packed_by(worker.identity))
        except sqlite3.OperationalError:
            return False  # frozen as it is, it may be in the way of readers
        return 0 < len(applied) < len(held)

    if not worker.kill_if(now):
        return None
    return Crash(
        worker=worker.name,
        process=worker.identity,
        pid=worker.pid,
        held=len(held),
        applied_but_held=len(applied),
    )


# ── the redrive ─────────────────────────────────────────────────────────────────────────────────────────

MENDED = Rca(
    category="business",  # type: ignore[arg-type]
    root_cause=f"the shop sold {NEW_ARTICLE} before the warehouse had it in its list",
    fix_ref=f"{NEW_ARTICLE} added to the list",
)


def redrive_one(watch: Watch) -> Redriven | None:
    """When all else is done: mend what one dead letter died of, and have it sent again until it is settled."""
    watch.until(lambda now: is_drained(watch.line, now))
    letter = _mendable(watch.line)
    if letter is None:
        return None
    ledger.add_article(watch.line.setup.ledger, NEW_ARTICLE)
    watch.screen.tell(f"{MENDED.fix_ref}: {letter.message_id} is redriven, which had died of it")
    applied = watch.until(lambda _: _is_settled(watch.line, letter))
    return Redriven(order=letter.message_id, died_of=letter.error, mended_by=MENDED.fix_ref, applied=applied)


def _mendable(line: Line) -> DeadLetter | None:
    wanted = Filter(consumer=CONSUMER, category="business", text=NEW_ARTICLE)  # type: ignore[arg-type]
    return next(iter(line.books.letters.find(wanted)), None)


def _is_settled(line: Line, letter: DeadLetter) -> bool:
    """A worker that failed with it just before the mending may bury it after that: then it is sent once more."""
    (found,) = line.books.letters.find(Filter(ids=(letter.id,)))
    if found.status is Status.OPEN:
        line.books.letters.redrive(Filter(consumer=CONSUMER, ids=(letter.id,)), rca=MENDED, operator="demo")
    return found.status is Status.RESOLVED


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
