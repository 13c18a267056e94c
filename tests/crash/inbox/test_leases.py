"""Consumers are frozen, overtaken, wrong about time or asked to stop: without a lease an attempt changes nothing."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.crash.inbox.worker import TARGET
from tests.support.inbox.site import SHORT_LEASE, InboxSite, stop, thaw
from tests.support.site import exit_code
from tests.support.wait import until


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InboxSite]:
    with InboxSite.on(request, tmp_path) as made:
        yield made


@pytest.fixture
def postgresql(tmp_path: Path, postgres_url: str) -> Iterator[InboxSite]:
    with InboxSite.on_postgresql(tmp_path, postgres_url) as made:
        yield made


def by(site: InboxSite) -> list[tuple[Any, ...]]:
    """What was written, and by whom."""
    site.effects()
    return site.ask("SELECT id, worker FROM credits ORDER BY id")


# ── frozen ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-012", "CC-003")
@pytest.mark.parametrize("point", ["calling", "called", "written"])
@pytest.mark.without("sqlite", "written")
def test_a_zombie_commits_nothing(site: InboxSite, point: str) -> None:
    """Frozen past its lease, it comes back when another has done the event. On SQLite no one can overtake one who has
    written: it has the whole database."""
    site.send(TARGET)
    reported: dict[str, Any] = {"mode": "effectful", "lease": SHORT_LEASE}
    zombie = site.start("zombie", point=point, waits=True, **reported)
    until(lambda: site.said("reached"))
    site.freeze_in_handler(zombie)
    site.drain("other", mode="effectful")
    assert by(site) == [(TARGET, "other")]
    thaw(zombie)
    site.go()
    site.send("later")  # it continues normally
    until(site.is_drained)
    stop(zombie)
    assert by(site) == [("later", "zombie"), (TARGET, "other")]
    assert site.charges() == Counter([TARGET, "later"])
    assert site.dead_letters() == []
    assert site.inbox.effects() == []
    site.check_nothing_is_stuck()


@pytest.mark.req("CC-012", "CC-003")
@pytest.mark.parametrize("heartless", [True, False])
def test_a_claim_that_somebody_else_had_in_between_is_lost_even_if_it_is_free_again(
    site: InboxSite, heartless: bool
) -> None:
    """The zombie, then a worker that claims and dies, then none: the ledger looks as before, but is not."""
    site.send(TARGET)
    reported: dict[str, Any] = {"mode": "effectful", "lease": SHORT_LEASE}
    zombie = site.start("zombie", point="calling", waits=True, heartless=heartless, **reported)
    until(lambda: site.said("reached"))
    site.freeze_in_handler(zombie)
    site.dies(name="second", point="settled", **reported)
    assert site.attempts(TARGET) == [(2, 0)]
    until(lambda: site.ask("SELECT locked_until FROM onceward_attempts")[0][0] < time.time())
    site.go()
    thaw(zombie)
    until(lambda: site.said("charging", by="zombie"))
    until(site.is_drained)
    stop(zombie)
    assert by(site) == [(TARGET, "zombie")]
    assert site.said("handling", by="zombie") == [
        TARGET,
        TARGET,
    ]  # fenced off once, then by its own claim
    assert site.charges() == Counter([TARGET])
    [(key, token)] = site.ask("SELECT effect_key, lock_token FROM onceward_effects")
    assert token == 1
    assert key.startswith(f"{TARGET}-1")
    assert site.dead_letters() == []
    site.check_nothing_is_stuck()


@pytest.mark.req("CC-012")
@pytest.mark.parametrize("end", ["killed", "thawed"])
def test_while_a_frozen_consumer_holds_an_event_others_are_busy_and_acknowledge_nothing(
    site: InboxSite, end: str
) -> None:
    """On SQLite it locks the whole database: that is also busy, and not a failed attempt."""
    if site.is_sqlite:
        site.connect_args = {"timeout": 1.5}  # long enough for two that start at once on a busy machine
    others = [site.start(name, queue="others.db", max_deliveries=2) for name in ("one", "two")]
    site.send("early", queue="others.db")
    until(lambda: site.is_drained("others.db"))
    site.send(TARGET)
    frozen = site.start("frozen", point="writing", waits=True, lease=SHORT_LEASE)
    until(lambda: site.said("reached"))
    site.freeze_in_handler(frozen, has_database=site.is_sqlite)
    site.send(TARGET, queue="others.db")
    until(lambda: (site.log("one") + site.log("two")).count("is postponed") > 3)
    assert site.said("handling") == ["early", TARGET]
    assert not site.is_drained("others.db")
    assert site.ask("SELECT id FROM credits") == [("early",)]
    if end == "killed":
        frozen.kill()
        assert exit_code(frozen) == -signal.SIGKILL
    else:
        site.go()
        thaw(frozen)
    until(lambda: site.is_drained("others.db"))
    if end == "killed":
        site.connect_args = {}  # one that starts waits for the others' transactions
        site.drain()
        stop(*others)
    else:
        until(site.is_drained)
        stop(*others, frozen)
    [(_, worker)] = site.ask(f"SELECT id, worker FROM credits WHERE id = '{TARGET}'")
    assert (worker == "frozen") == (end == "thawed")
    assert site.effects() == Counter(["early", TARGET])
    reports = site.reports()
    assert (reports["succeeded"], reports["duplicates"], reports["failed"]) == (3, 1, 0)
    assert site.dead_letters() == site.dead_letters("others.db") == []


# ── slow ────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_is_slow_and_alive_keeps_its_events(tmp_path: Path, postgres_url: str) -> None:
    """A handler that takes several leases, while others of its batch wait for their turn. Neither the source nor the
    inbox gives them to another worker.

    Stores and modes run at the same time, to save time: two of them have the same events in two schemas of one
    database.
    """
    lease, ids = 2.0, [TARGET, "second", "third"]
    kinds = [("sqlite", "effectful"), ("postgresql", "effectful"), ("postgresql", "transactional")]
    with ExitStack() as stack:
        sites: list[tuple[InboxSite, list[str]]] = []
        processes = []
        for store, mode in kinds:
            folder = tmp_path / f"{store}-{mode}"
            folder.mkdir()
            made = (
                InboxSite.on_sqlite(folder)
                if store == "sqlite"
                else InboxSite.on_postgresql(folder, postgres_url)
            )
            site = stack.enter_context(made)
            site.send(*ids)
            point = "calling" if mode == "effectful" else "writing"
            processes.append(site.start("slow", mode=mode, lease=lease, point=point, waits=True))
            until(lambda site=site: site.said("reached"))  # type: ignore[misc]
            processes.append(site.start("idle", mode=mode, lease=lease))
            copies = (
                [TARGET] if mode == "effectful" else ids
            )  # an effectful consumer claims when its turn comes
            site.send(*copies, queue="copies.db")
            processes.append(site.start("copycat", mode=mode, lease=lease, queue="copies.db"))
            sites.append((site, copies))
        time.sleep(2.5 * lease)
        for site, _ in sites:
            site.go()
            until(lambda site=site: site.is_drained() and site.is_drained("copies.db"))  # type: ignore[misc]
        stop(*processes)
        for site, copies in sites:
            assert site.said("handling") == ids
            assert by(site) == sorted((id_, "slow") for id_ in ids)
            reports = site.reports()
            assert (reports["succeeded"], reports["duplicates"]) == (3 + len(copies), len(copies))
            assert reports["failed"] == 0


# ── wrong about the time ────────────────────────────────────────────────────────────────────────────────

FAST, SLOW = 300.0, -300.0


@pytest.mark.parametrize("mode", ["transactional", "effectful"])
@pytest.mark.parametrize(("skew", "other_skew"), [(FAST, SLOW), (SLOW, FAST)], ids=["fast", "slow"])
def test_a_wrong_clock_takes_no_event_from_another(
    postgresql: InboxSite, mode: str, skew: float, other_skew: float
) -> None:
    """Both have copies of all events. By the clock of one, the lease of the other expired long ago."""
    site = postgresql
    ids = [TARGET, *(f"event-{number}" for number in range(10))]
    for queue in ("holder.db", "other.db"):
        site.send(*ids, queue=queue)
    point = "writing" if mode == "transactional" else "calling"
    holder = site.start("holder", queue="holder.db", mode=mode, point=point, waits=True, skew=skew)
    until(lambda: site.said("reached"))
    other = site.start("other", queue="other.db", mode=mode, skew=other_skew)
    until(lambda: site.log("other").count("is postponed") > 3)
    assert TARGET not in site.said("handling", by="other")
    site.go()
    until(lambda: site.is_drained("holder.db") and site.is_drained("other.db"))
    stop(holder, other)
    assert site.effects() == Counter(ids)
    assert Counter(site.said("handling")) == Counter(ids)
    assert site.charges() == (Counter(ids) if mode == "effectful" else Counter())
    assert site.reports()["duplicates"] == len(ids)
    assert site.reports()["failed"] == 0


@pytest.mark.parametrize(("skew", "other_skew"), [(FAST, SLOW), (SLOW, FAST)], ids=["fast", "slow"])
def test_the_lease_of_the_dead_runs_out_whatever_their_clock_said(
    postgresql: InboxSite, skew: float, other_skew: float
) -> None:
    site = postgresql
    site.send(TARGET)
    site.dies(mode="effectful", point="called", skew=skew)
    site.drain(mode="effectful", skew=other_skew)
    assert site.effects() == site.charges() == Counter([TARGET])


# ── asked to stop ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("CC-051")
@pytest.mark.parametrize("mode", ["transactional", "effectful"])
def test_sigterm_lets_the_event_in_hand_end_and_gives_the_others_back_uncounted(
    site: InboxSite, mode: str
) -> None:
    mates = [f"mate-{number}" for number in range(5)]
    others = [f"other-{number}" for number in range(10)]
    site.send(TARGET, *mates, *others)
    point = "writing" if mode == "transactional" else "calling"
    process = site.start("leaving", mode=mode, point=point, waits=True, batch=6)
    until(lambda: site.said("reached"))
    process.terminate()
    until(lambda: ["leaving", "stopping"] in site.journal())
    site.go()
    assert exit_code(process) == 0
    assert by(site) == [(TARGET, "leaving")]
    assert site.said("handling") == [TARGET]
    assert site.reports() == Counter(succeeded=1, unstarted=5)
    assert site.queue().counts() == {"ready": 15, "leased": 0, "delayed": 0, "dead": 0}
    with closing(sqlite3.connect(site.folder / "queue.db")) as connection:
        assert connection.execute("SELECT DISTINCT deliveries FROM messages").fetchall() == [(0,)]
    counted = [(1, 1)] if mode == "transactional" else []
    assert [site.attempts(id_) for id_ in mates] == [counted] * 5
    site.check_nothing_is_stuck()
    site.drain(mode=mode)
    assert site.effects() == Counter([TARGET, *mates, *others])
    assert site.dead_letters() == []
