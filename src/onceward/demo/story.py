"""The demo from beginning to end: produce, forward, cut, heal, kill, restart, drain, redrive, balance."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter

from onceward.deadletters import DeadLetter, Filter, Rca, Status
from onceward.demo import ledger
from onceward.demo.balance import compute_balance
from onceward.demo.crew import DemoWorker
from onceward.demo.line import Observer, Pipeline, running
from onceward.demo.orders import NEW_ARTICLE, make_messages, make_orders
from onceward.demo.screen import Crash, Cut, DemoProgress, DemoResult, RedrivenLetter, Screen
from onceward.demo.setup import CONSUMER, Setup

HUNT = 0.02
"""Seconds between two attempts to catch a worker in the middle of a batch."""
CUT_SECONDS = 3.0
PART_BEFORE_THE_CUT = 0.4
"""Fraction of the messages sent before the link is cut. The rest is sent meanwhile."""
FIXED_CAUSE = Rca(
    category="business",  # type: ignore[arg-type]
    root_cause=f"the shop sold {NEW_ARTICLE} before the warehouse had it in its list",
    fix_ref=f"{NEW_ARTICLE} added to the list",
)


def run_story(setup: Setup, screen: Screen) -> DemoResult:
    """Run the whole demo. Raises `ProcessDied` if a process dies that the demo did not kill."""
    began = time.monotonic()
    orders = make_orders(setup.orders, setup.seed)
    messages = make_messages(orders, setup.seed)
    screen.begin(len(orders), len(messages))
    with running(setup, messages, int(len(messages) * PART_BEFORE_THE_CUT)) as line:
        for child in (*line.zones.children, *line.crew.children):
            screen.announce(f"{child.name} started (pid {child.pid})")
        observer = Observer(line, screen)
        cut = cut_the_link(observer)
        crash = kill_a_worker(observer)
        redriven = redrive_one(observer)
        reports = line.crew.stop()
        screen.show(line.books.progress())
        return DemoResult(
            balance=compute_balance(orders, len(messages), line.books.evidence()),
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


# Turning points: each waits for its moment, and returns None if that never comes.


# ── the link ────────────────────────────────────────────────────────────────────────────────────────────


def cut_the_link(observer: Observer) -> Cut | None:
    """Cut the link when a quarter of the facts has passed, and heal it when both zones have worked on for a while."""
    line, screen = observer.line, observer.screen
    if not observer.until(lambda now: now.forwarded >= line.setup.orders // 4):
        line.sending.resume()
        return None
    line.wire.cut()
    cut_at, before = time.monotonic(), observer.refresh()
    screen.announce(f"link cut: {before.forwarded:,} facts have passed", bad=True)
    line.sending.resume()
    went_on = observer.until(
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
        appended=observer.now.appended - before.appended,
        applied=observer.now.applied - before.applied,
        waiting=observer.now.appended - observer.now.forwarded,
    )
    screen.announce(
        f"link healed after {cut.seconds:g} s: meanwhile the shop took {cut.appended:,} orders, the warehouse shipped "
        f"{cut.applied:,}, and {cut.waiting:,} facts are waiting"
    )
    return cut


# ── the kill ────────────────────────────────────────────────────────────────────────────────────────────


def kill_a_worker(observer: Observer) -> Crash | None:
    """After half of the orders, kill the first worker found in the middle of a batch, and restart it."""
    crashes: list[Crash] = []

    def is_killed(now: DemoProgress) -> bool:
        if now.applied >= observer.line.setup.orders // 2:
            crashes.extend(_kill_one(observer))
        return bool(crashes) or is_drained(observer.line, now)

    observer.until(is_killed, HUNT)
    return crashes[0] if crashes else None


def is_drained(line: Pipeline, now: DemoProgress) -> bool:
    """Whether the workers have finished every order."""
    return now.confirmed == now.forwarded == now.appended == line.setup.orders


def _kill_one(observer: Observer) -> list[Crash]:
    """Kill one worker at the right moment; returns an empty list if none was there."""
    for worker in observer.line.crew.children:
        crash = _kill_at_the_worst_moment(worker, observer.line)
        if crash is not None:
            observer.screen.announce(
                f"{crash.worker} killed with -9: it held {crash.held:,} orders, {crash.applied_but_held:,} of them "
                "shipped but not acknowledged",
                bad=True,
            )
            again = observer.line.crew.restart(worker)
            observer.screen.announce(f"{again.name} restarted (pid {again.pid})")
            return [crash]
    return []


def _kill_at_the_worst_moment(worker: DemoWorker, line: Pipeline) -> Crash | None:
    """Kill it while it holds orders that it has shipped but not acknowledged, and others not shipped."""
    held: set[str] = set()
    applied: set[str] = set()

    def now() -> bool:
        try:
            held.update(line.books.journal.held_by(worker.identity))
            applied.update(held & line.books.ledger.packed_by(worker.identity))
        except sqlite3.OperationalError:
            return False  # the frozen process may block readers
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


def redrive_one(observer: Observer) -> RedrivenLetter | None:
    """When everything else is done, fix the cause of one dead letter and redrive it until it is settled."""
    observer.until(lambda now: is_drained(observer.line, now))
    letter = _fixable_letter(observer.line)
    if letter is None:
        return None
    ledger.add_article(observer.line.setup.ledger, NEW_ARTICLE)
    observer.screen.announce(f"{FIXED_CAUSE.fix_ref}: redriving {letter.message_id}, which had died of it")
    applied = observer.until(lambda _: _is_settled(observer.line, letter))
    return RedrivenLetter(
        order=letter.message_id, died_of=letter.error, mended_by=FIXED_CAUSE.fix_ref, applied=applied
    )


def _fixable_letter(line: Pipeline) -> DeadLetter | None:
    wanted = Filter(consumer=CONSUMER, category="business", text=NEW_ARTICLE)  # type: ignore[arg-type]
    return next(iter(line.books.letters.find(wanted)), None)


def _is_settled(line: Pipeline, letter: DeadLetter) -> bool:
    """Whether it is resolved. If a worker that failed before the fix buries it afterwards, redrive it again."""
    (found,) = line.books.letters.find(Filter(ids=(letter.id,)))
    if found.status is Status.OPEN:
        line.books.letters.redrive(
            Filter(consumer=CONSUMER, ids=(letter.id,)), rca=FIXED_CAUSE, operator="demo"
        )
    return found.status is Status.RESOLVED
