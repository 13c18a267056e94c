"""Consumers are killed at every point, and their database too: every event takes effect once, and none is lost."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from tests.crash.inbox import worker
from tests.crash.inbox.worker import TARGET, Orders, contract_of
from tests.support.inbox.site import (
    SHORT_LEASE,
    InboxSite,
    freeze,
    stop,
    thaw,
)
from tests.support.own_postgres import own_postgres
from tests.support.site import exit_code
from tests.support.wait import until

STORES = ["sqlite", "postgresql"]
EVENTS = ["before", TARGET, "behind"]


@pytest.fixture(params=STORES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InboxSite]:
    with InboxSite.on(request, tmp_path) as made:
        yield made


def once(*ids: str) -> Counter[str]:
    return Counter(ids)


# ── killed at a point ───────────────────────────────────────────────────────────────────────────────────

THREADS, ASYNCIO = False, True
NOT_STARTED, NOT_CHARGED = ("fetched",), ("fetched", "started", "intended")


@pytest.mark.req("CC-012", "CC-002")
@pytest.mark.parametrize(
    ("point", "asynchronous"),
    [
        ("fetched", THREADS),
        ("started", THREADS),
        ("admitted", THREADS),
        ("writing", THREADS),
        ("writing", ASYNCIO),
        ("before-commit", THREADS),
        ("committed", THREADS),
        ("committed", ASYNCIO),
    ],
)
def test_a_transactional_consumer_killed_at_any_point(
    site: InboxSite, point: str, asynchronous: bool
) -> None:
    site.send(*EVENTS)
    site.dies(point=point, asynchronous=asynchronous)
    assert site.effects()[TARGET] == (point == "committed")
    assert site.attempts(TARGET) == ([] if point in NOT_STARTED else [(1, 0)])
    assert not site.is_drained()

    # An event that was acknowledged just before does not come again: nothing takes its row off but a purge.
    site.drain(forgetting=EVENTS[-site.undone() :], asynchronous=asynchronous)
    assert site.effects() == once(*EVENTS)
    assert site.said("handling", by="restarted").count(TARGET) == (point != "committed")
    assert site.reports()["failed"] == 0
    assert site.reports()["duplicates"] >= (point == "committed")
    assert site.dead_letters() == []
    site.check_nothing_is_stuck()


@pytest.mark.req("CC-012", "CC-003")
@pytest.mark.parametrize(
    ("point", "keyed", "asynchronous"),
    [
        ("fetched", True, THREADS),
        ("started", True, THREADS),
        ("intended", True, THREADS),
        ("intended", False, THREADS),
        ("called", True, THREADS),
        ("called", False, THREADS),
        ("called", True, ASYNCIO),
        ("settled", False, THREADS),
        ("before-commit", True, THREADS),
        ("committed", True, THREADS),
    ],
)
def test_an_effectful_consumer_killed_at_any_point(
    site: InboxSite, point: str, keyed: bool, asynchronous: bool
) -> None:
    """The provider honors the key, or `reconcile` asks it: either way it charges once."""
    reported: dict[str, Any] = {"mode": "effectful", "keyed": keyed, "asynchronous": asynchronous}
    site.send(*EVENTS)
    site.dies(point=point, **reported)
    assert site.effects()[TARGET] == (point == "committed")
    assert site.attempts(TARGET) == ([] if point in (*NOT_STARTED, "committed") else [(1, 0)])
    in_doubt = point in ("intended", "called")
    assert [row["tracking_id"] for row in site.inbox.effects()] == ([TARGET] if in_doubt else [])
    assert site.charges()[TARGET] == (point not in NOT_CHARGED)

    site.drain(forgetting=EVENTS[-site.undone() :], **reported)
    assert site.effects() == once(*EVENTS)
    assert site.charges() == once(*EVENTS)
    assert site.said("charging").count(TARGET) == (2 if keyed and point == "called" else 1)
    assert len(site.said("reconciling")) == (in_doubt and not keyed)
    assert site.said("handling", by="restarted").count(TARGET) == (point != "committed")
    assert site.reports()["failed"] == 0
    assert site.dead_letters() == []
    site.check_nothing_is_stuck()


@pytest.mark.req("CC-051")
@pytest.mark.parametrize("mode", ["transactional", "effectful"])
def test_killed_after_each_commit_it_is_no_poison_but_done(site: InboxSite, mode: str) -> None:
    site.send(TARGET)
    for _ in range(4 if mode == "transactional" else 1):  # an effectful duplicate has nothing to commit
        site.dies(point="committed", mode=mode, max_deliveries=10)
    site.drain(forgetting=[TARGET], mode=mode, max_deliveries=10)
    assert site.effects() == once(TARGET)
    assert site.said("handling") == [TARGET]
    assert site.dead_letters() == []


# ── many at once ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-012", "CC-002")
@pytest.mark.parametrize("mode", ["transactional", "effectful"])
def test_eight_processes_get_the_same_events_at_once(site: InboxSite, mode: str) -> None:
    """None of them acknowledges an event before the one that did it has committed."""
    ids = [f"event-{number}" for number in range(15)]
    workers = [f"worker-{number}" for number in range(8)]
    for name in workers:
        site.send(*ids, queue=f"{name}.db")
    processes = [
        site.start(
            name, queue=f"{name}.db", mode=mode, slots=2, takes=0.005, waits_to_begin=True, checked=True
        )
        for name in workers
    ]
    site.go()
    until(lambda: all(site.is_drained(f"{name}.db") for name in workers))
    stop(*processes)
    assert site.effects() == once(*ids)
    assert Counter(site.said("handling")) == once(*ids)
    assert site.charges() == (once(*ids) if mode == "effectful" else Counter())
    assert site.said("acknowledged-too-early") == []
    reports = site.reports()
    assert (reports["succeeded"], reports["duplicates"]) == (8 * len(ids), 7 * len(ids))
    assert reports["failed"] == 0
    assert [site.dead_letters(f"{name}.db") for name in workers] == [[]] * 8


# ── poison ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-051", "CC-022")
def test_an_event_that_kills_its_process_is_set_aside_and_its_batch_is_not(site: InboxSite) -> None:
    mates = [f"mate-{number}" for number in range(6)]
    others = [f"other-{number}" for number in range(10)]
    site.send(*mates[:3], TARGET, *mates[3:], *others)
    for _ in range(3):
        site.dies(point="writing", batch=7, slots=3)
    site.drain(point="writing", batch=7, slots=3)  # it is still deadly
    assert site.effects() == once(*mates, *others)
    check_poison(site, starts=3)


@pytest.mark.req("CC-051", "CC-022")
def test_what_is_in_hand_when_its_process_is_killed_is_no_poison(site: InboxSite) -> None:
    """They all die together, once. From then on each runs alone, and only the one to blame dies again."""
    mates = ["mate-1", "mate-2", "mate-3"]
    site.send(TARGET, *mates)
    reported: dict[str, Any] = {"mode": "effectful", "point": "called", "slots": 4, "poison_after": 2}
    for _ in range(2):
        site.dies(**reported, takes=0.2)
    site.drain(**reported)
    assert site.effects() == once(*mates)
    assert site.charges() == once(*mates, TARGET)
    check_poison(site, starts=2)


def check_poison(site: InboxSite, starts: int) -> None:
    [dead] = site.dead_letters()
    assert dead.transaction_id == TARGET
    assert dead.error is not None
    assert f"started {starts} times without ever ending" in dead.error
    assert site.attempts(TARGET) == [(starts, 0)]
    assert len(site.said("reached")) == starts


# ── isolation ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-022")
@pytest.mark.parametrize("way", ["crashes", "hangs"])
def test_a_consumer_that_crashes_or_hangs_changes_nothing_for_another(site: InboxSite, way: str) -> None:
    """Both have their own queue of the same events, in one database. SQLite has one writer at a time, so there a
    consumer may only hang outside its transaction."""
    ids = [f"event-{number}" for number in range(20)]
    for queue in ("a.db", "b.db"):
        site.send(TARGET, *ids, queue=queue)
    mode, point = ("effectful", "calling") if site.is_sqlite else ("transactional", "writing")
    reported: dict[str, Any] = {"queue": "a.db", "consumer": "a", "mode": mode}
    if way == "hangs":
        hanging = site.start("a", **reported, point=point, waits=True, lease=SHORT_LEASE)
        until(lambda: site.said("reached", by="a"))
    else:
        for _ in range(2):
            site.dies(**reported, point=point)
    site.drain("b", queue="b.db", consumer="b")
    done = Counter(id_ for (id_,) in site.ask("SELECT id FROM credits WHERE worker = 'b'"))
    assert done == once(TARGET, *ids)
    assert site.said("handling", by="a") in ([], [TARGET])
    if way == "hangs":
        hanging.kill()
        assert exit_code(hanging) == -signal.SIGKILL
    site.drain("a-again", **reported)
    done = Counter(id_ for (id_,) in site.ask("SELECT id FROM credits WHERE worker <> 'b'"))
    assert done == once(TARGET, *ids)
    assert site.dead_letters("a.db") == site.dead_letters("b.db") == []
    site.check_nothing_is_stuck()


# ── power cuts ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-012")
@pytest.mark.parametrize("journal", ["wal", "torn wal", "delete"])
def test_a_file_that_was_cut_off_anywhere_has_both_rows_or_neither(tmp_path: Path, journal: str) -> None:
    """Writers are frozen at random moments, and their files copied: what a power cut leaves behind.

    A torn copy also loses some of the log's end; without checkpoints, that is what a disk may lose that had not written
    it yet.
    """
    chance = random.Random(journal)
    with InboxSite.on_sqlite(tmp_path) as site:
        site.ask(f"PRAGMA journal_mode = {journal.split()[-1]}")
        function = write_without_checkpoints if journal == "torn wal" else worker.write_for_ever
        writers = []
        for name in ("one", "two"):
            orders = Orders(site.folder, site.url, site.connect_args, name)
            site.inbox.register(contract_of(orders))
            writers.append(site.fork(function, orders, name))
        until(lambda: len(site.ask("SELECT id FROM credits")) > 10)
        copies = []
        for number in range(25):
            time.sleep(chance.uniform(0, 0.06))
            freeze(*writers)
            copies.append(copied(tmp_path / "business.db", tmp_path / f"copy-{number}"))
            thaw(*writers)
    sizes = set()
    for copy in copies:
        wal = copy.with_name("business.db-wal")
        if journal == "torn wal":
            size = wal.stat().st_size
            with wal.open("r+b") as file:
                file.truncate(chance.randrange(size // 2, size))
        with closing(sqlite3.connect(copy)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            found = [
                sorted(connection.execute(f"SELECT {column} FROM {table}").fetchall())
                for table, column in (("debits", "id"), ("credits", "id"), ("onceward_dedup", "tracking_id"))
            ]
        assert found[0] == found[1] == found[2]
        assert len(set(found[0])) == len(found[0])
        sizes.add(len(found[0]))
    assert len(sizes) > 5


def write_without_checkpoints(orders: Orders, own: str) -> None:
    from sqlalchemy import Engine, event

    def connected(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA wal_autocheckpoint = 0")

    event.listen(Engine, "connect", connected)
    worker.write_for_ever(orders, own)


def copied(database: Path, folder: Path) -> Path:
    folder.mkdir()
    for suffix in ("", "-wal", "-journal"):
        path = database.with_name(database.name + suffix)
        if path.exists():
            shutil.copy(path, folder)
    return folder / database.name


# ── database outages ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-012", "CC-022")
def test_postgresql_restarted_under_load(tmp_path: Path) -> None:
    """Nothing is lost, nothing doubled, and no event is dead-lettered because of it."""
    ids = [f"event-{number}" for number in range(800)]
    with own_postgres() as server, InboxSite.on_postgresql(tmp_path, server.url) as site:
        workers = [site.start(name, slots=4, lease=5.0) for name in ("one", "two")]
        until(lambda: all(site.said("ready", by=name) for name in ("one", "two")))  # one that starts needs it
        site.send(*ids)

        def has_done(part: float) -> bool:
            with suppress(OperationalError):
                return bool(site.ask("SELECT count(*) FROM credits")[0][0] >= part * len(ids))
            return False

        until(lambda: has_done(0.15))
        server.control("restart", "-m", "fast")
        until(lambda: has_done(0.35))
        server.kill_a_backend()
        until(lambda: has_done(0.55))
        server.control("stop", "-m", "immediate")
        time.sleep(1.0)
        server.start()
        until(site.is_drained)
        stop(*workers)
        assert site.effects() == once(*ids)
        assert site.dead_letters() == []
        site.check_nothing_is_stuck()
