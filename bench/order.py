"""What order by key costs: events per second with and without `order_by`, and what a stuck key costs the others.

One process of 16 slots, ten times as many keys, and a backlog that is twice what is measured: a rate, without the end,
when only a few keys are left. Each round runs without order, twice with it, and again without; the median of the rounds
counts. The best run does not: once in a while the disk makes one of them look a fifth faster than the others.

The stuck key has ten thousand events, which wait behind one that another process holds. They have lined up before: it
is measured what they cost while they wait, not once. That is less than the noise of any rate. So it is measured by CPU
time, of the client and the server together, and only where a stuck key can change something: in fetches and outcomes.
Each round ends five hundred others without the stuck key, twice with it, and again without, in two queues that are
otherwise alike. The cost is the mean difference in a round, as a part of all the CPU time that an event takes, with its
95 % interval; the target is met if the whole interval is below it.
"""

from __future__ import annotations

import gc
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple
from uuid import uuid4

from redis import Redis
from sqlalchemy import create_engine, text

from bench.measure import Line
from onceward import Contract, Onceward
from onceward.app.build import open_task
from onceward.connectors.urls import Address
from onceward.testing.servers import postgres_server, redis_server
from onceward.transaction import Settlement, Transaction, Verdict

EVENTS = 3000
SLOTS = 16
BATCH = 100
ROUNDS = 9
POLICY = {
    "loop": {
        "streaming": False, "mode": "continuous", "batch": {"size": BATCH}, "concurrency": {"value": SLOTS},
        "limit": EVENTS,
    }
}  # fmt: skip
STUCK, OTHERS = 10_000, 500
LEAST_ROUNDS, MOST_ROUNDS = 30, 300
EXACT = 0.002
"""Rounds end when the interval is not wider than this to either side, as a part of all the CPU time."""
TRIMMED = 0.1
"""The part of the rounds that does not count, at either end: another process disturbed one of their runs."""


class _Place(NamedTuple):
    """Where queues are."""

    new: Callable[[], tuple[str, str]]
    """The URLs of a database, and of a new queue."""
    work: Callable[[], dict[int, float]]
    """The CPU seconds of the processes of its server."""


class _Cost(NamedTuple):
    """Microseconds per event."""

    took: float
    worked: float


def lines() -> Iterator[Line]:
    for name, open_place in (("SQLite", _sqlite), ("PostgreSQL", _postgresql), ("Redis", _redis)):
        with open_place() as place:
            for order_by in (None, "key"):
                _run(place, order_by)  # to warm up
            costs = [_one_after_another(place) for _ in range(ROUNDS)]
            plain, ordered = (median(each.took for each in which) for which in zip(*costs, strict=True))
            worked = median(each.worked for _, each in costs)
            more, error = _cost_of_stuck_key(place, EXACT * worked)
        share = median(plain.took / ordered.took for plain, ordered in costs)
        yield Line(
            f"{name}: no order / order_by, 160 keys", plain, ordered, "≥ 80 %", share >= 0.8, f"{share:.0%}"
        )
        yield Line(
            f"{name}: order_by / one key stuck, CPU",
            worked,
            worked + more,
            "≤ 1 %",
            more + error <= worked / 100,
            f"{more / worked:+.1%} ±{error / worked:.1%}",
        )


def _one_after_another(place: _Place) -> tuple[_Cost, _Cost]:
    """Without and with order, in a sequence that treats both alike if the disk gets slower or faster meanwhile."""
    before, ordered, again, after = (_run(place, by) for by in (None, "key", "key", None))
    return _both(before, after), _both(ordered, again)


def _both(one: _Cost, other: _Cost) -> _Cost:
    return _Cost((one.took + other.took) / 2, (one.worked + other.worked) / 2)


def _run(place: _Place, order_by: str | None) -> _Cost:
    database, source = place.new()
    app = Onceward("bench", database=database)
    contract = Contract(
        consumer_id=uuid4().hex, event_types=["*"], owner_team="bench", idempotency_mechanism="inbox"
    )

    @app.consumer(source, contract=contract, policy=POLICY, order_by=order_by)
    def book(event: dict[str, Any], session: Any) -> None:
        session.execute("SELECT 1")

    with closing(_open(source, is_ordered=order_by is not None)) as queue:
        assert not queue.fetch_transactions(1)  # it makes what it needs
        queue.dispatch_transactions(_events(2 * EVENTS, random.Random(5)))
    gc.collect()
    with open_task(app, app.consumers["book"]) as task, _Work(place) as work:
        report = task.consume_transactions(app.consumers["book"].policy)
    assert report.succeeded == EVENTS, report
    return work.cost(EVENTS)


def _cost_of_stuck_key(place: _Place, exact: float) -> tuple[float, float]:
    """Microseconds of CPU time that each of the others takes longer, and half the width of the interval."""
    with ExitStack() as opened:

        def queue(source: str) -> Any:
            return opened.enter_context(closing(_open(source, is_ordered=True)))

        sources = [place.new()[1] for _ in range(2)]
        elsewhere = queue(sources[1])
        elsewhere.dispatch_transactions([Transaction(payload={"key": "stuck"}) for _ in range(STUCK)])
        held = elsewhere.fetch_transactions(1)
        assert len(held) == 1
        assert not elsewhere.fetch_transactions(STUCK)  # it has lined up all
        free, stuck = (_Others(place, queue(source)) for source in sources)
        for each in (free, stuck):
            each.run()  # to warm up
        more: list[float] = []
        while True:
            elsewhere.extend_transactions(held)
            first, second, third, fourth = (each.run() for each in (free, stuck, stuck, free))
            more.append((second + third - first - fourth) / 2)
            if len(more) >= LEAST_ROUNDS:
                found, error = _estimate(more)
                if error <= exact or len(more) >= MOST_ROUNDS:
                    return found, error


class _Others:
    """Events of other keys, of which some are always in flight, and some wait."""

    def __init__(self, place: _Place, queue: Any) -> None:
        self._place = place
        self._queue = queue
        self._chance = random.Random(5)
        self._open: list[Transaction] = []
        queue.dispatch_transactions(_events(EVENTS, self._chance))

    def run(self) -> float:
        """Fetch and end as many as are sent before. Return the CPU time of each, in microseconds."""
        queue, ended = self._queue, 0
        queue.dispatch_transactions(_events(OTHERS, self._chance))
        gc.collect()
        with _Work(self._place) as work:
            while ended < OTHERS:
                self._open += queue.fetch_transactions(BATCH)
                ending, self._open = self._open[:-SLOTS], self._open[-SLOTS:]
                queue.settle_transactions([Settlement(each, Verdict.DONE) for each in ending])
                ended += len(ending)
        return work.cost(ended).worked


class _Work:
    """How long a block takes, and the CPU time of this process and of the server meanwhile."""

    def __init__(self, place: _Place) -> None:
        self._server = place.work

    def __enter__(self) -> _Work:
        self._before = self._server()
        self._worked, self._took = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._took = time.perf_counter() - self._took
        self._worked = time.process_time() - self._worked
        after = self._server()
        self._worked += sum(seconds - self._before.get(process, 0.0) for process, seconds in after.items())

    def cost(self, events: int) -> _Cost:
        return _Cost(self._took / events * 1e6, self._worked / events * 1e6)


def _estimate(values: Sequence[float]) -> tuple[float, float]:
    """The mean without the outermost ones, and half the width of its 95 % interval (Tukey and McLaughlin)."""
    out = int(TRIMMED * len(values))
    inner = sorted(values)[out : len(values) - out]
    pulled_in = [min(max(each, inner[0]), inner[-1]) for each in values]
    return mean(inner), 2.0 * stdev(pulled_in) / ((1 - 2 * TRIMMED) * math.sqrt(len(values)))


def _events(count: int, chance: random.Random) -> list[Transaction]:
    return [Transaction(payload={"key": chance.randrange(10 * SLOTS)}) for _ in range(count)]


def _open(source: str, *, is_ordered: bool) -> Any:
    queue = Address(source).open(asynchronous=False)
    if is_ordered:
        queue.keep_order(lambda transaction: str(transaction.payload["key"]), hold_dead=True)
    return queue


@contextmanager
def _sqlite() -> Iterator[_Place]:
    with tempfile.TemporaryDirectory() as directory:

        def new() -> tuple[str, str]:
            name = f"sqlite:///{directory}/{uuid4().hex}"
            return f"{name}.db", f"{name}-queue.db"

        yield _Place(new, dict)


@contextmanager
def _redis() -> Iterator[_Place]:
    with redis_server() as server, _sqlite() as beside, Redis.from_url(server.url) as client:

        def work() -> dict[int, float]:
            used: Any = client.info("cpu")
            return {0: used["used_cpu_user"] + used["used_cpu_sys"]}

        yield _Place(lambda: (beside.new()[0], f"{server.url}/{uuid4().hex}"), work)


@contextmanager
def _postgresql() -> Iterator[_Place]:
    with postgres_server() as server:
        both = "&" if "?" in server.url else "?"
        asks = create_engine(server.url, isolation_level="AUTOCOMMIT")
        serving = text("SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'")

        def work() -> dict[int, float]:
            """By process, where the system tells."""
            with asks.connect() as connection:
                pids = [*connection.execute(serving).scalars()]
            times = {pid: Path(f"/proc/{pid}/schedstat") for pid in pids}
            return {
                pid: int(each.read_text().split()[0]) / 1e9 for pid, each in times.items() if each.exists()
            }

        yield _Place(lambda: (server.url, f"{server.url}{both}queue=q{uuid4().hex}"), work)
        asks.dispose()
