"""The demo from its beginning to its end: produce, consume, kill, start again, drain, balance."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from onceward.cli.demo.balance import strike_balance
from onceward.cli.demo.books import Books
from onceward.cli.demo.crew import Crew, Worker
from onceward.cli.demo.orders import make_messages, make_orders
from onceward.cli.demo.result import Crash, Progress, Result
from onceward.cli.demo.screen import Screen
from onceward.cli.demo.setup import Setup
from onceward.cli.demo.tasks import SendOrder, producing
from onceward.connectors import SqliteConnector
from onceward.task.report import Report
from onceward.transaction import Transaction

LOOK = 0.1
"""Seconds between two looks at the books."""
HUNT = 0.02
"""Seconds between two while a worker is to be caught in the middle of a batch."""
GIVE_UP_AFTER = 20.0
"""Seconds without any change after which there will be none."""


def tell(setup: Setup, screen: Screen) -> Result:
    """Run the whole demo. Raises `WorkerDied` when a worker does so without being killed by us."""
    orders = make_orders(setup.orders, setup.seed)
    messages = make_messages(orders, setup.seed)
    with setup.open_queue() as queue, closing(Books(setup, queue)) as books:
        began = time.monotonic()
        produce(messages, queue, screen)
        produced = time.monotonic()
        crash, reports = consume(setup, books, screen)
        consumed = time.monotonic()
        progress = books.progress(crash)
        dead_letters = books.dead_letters()
        return Result(
            balance=strike_balance(
                orders,
                applied=books.ledger.ids(),
                dead={str(letter.transaction_id) for letter in dead_letters},
                accounts=books.ledger.accounts(),
                left_in_queue=progress.in_queue,
            ),
            fates=Counter(str(order.fate) for order in orders),
            messages=len(messages),
            duplicates=progress.duplicates,
            crash=crash,
            redelivered=progress.redelivered,
            recognised=books.ledger.redeliveries(),
            dead_letters=Counter(str(letter.category) for letter in dead_letters),
            retries=sum(report.retries for report in reports),
            timeouts=sum(report.timed_out for report in reports),
            producing_seconds=produced - began,
            consuming_seconds=consumed - produced,
        )


def produce(messages: Sequence[Transaction], queue: SqliteConnector, screen: Screen) -> None:
    """Send all messages through the producer engine."""
    screen.begin_producing(len(messages))
    task = SendOrder(connectors={"queue": queue}, services={"screen": screen})
    task.produce_transactions(messages, producing())


def consume(setup: Setup, books: Books, screen: Screen) -> tuple[Crash | None, Sequence[Report]]:
    """Have the workers empty the queue, with one of them killed half-way."""
    screen.begin_consuming(setup.orders)
    crash: Crash | None = None
    patience = Patience(GIVE_UP_AFTER)
    with Crew(setup) as crew:
        crew.start()
        for worker in crew.workers:
            screen.started(worker)
        while True:
            crew.check()
            progress = books.progress(crash)
            screen.consuming(progress)
            if progress.in_queue == 0 or patience.ends(progress):
                return crash, crew.stop()
            hunting = crash is None and progress.settled >= setup.orders // 2
            if hunting:
                crash = kill_one(crew, books, screen)
            time.sleep(HUNT if hunting else LOOK)


def kill_one(crew: Crew, books: Books, screen: Screen) -> Crash | None:
    """Kill the first worker found in the middle of a batch, and start it again. None: none was; try later."""
    for worker in crew.workers:
        crash = killed_at_the_worst_moment(worker, books)
        if crash is not None:
            screen.killed(crash)
            again = crew.restart(worker)
            screen.started(again)
            return crash
    return None


def killed_at_the_worst_moment(worker: Worker, books: Books) -> Crash | None:
    """It holds orders that have taken effect and are not acknowledged, and others that have not."""
    held: set[int] = set()
    applied: set[int] = set()

    def now() -> bool:
        try:
            held.update(books.journal.held_by(worker.identity))
            applied.update(held & books.ledger.messages())
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


class Patience:
    """Runs out when nothing changes for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: Progress | None = None
        self._changed_at = time.monotonic()

    def ends(self, progress: Progress) -> bool:
        if progress != self._last:
            self._last, self._changed_at = progress, time.monotonic()
        return time.monotonic() - self._changed_at > self._seconds
