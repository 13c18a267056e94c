"""The queue is in the inbox's database: consumers are killed and frozen at every point, and a message is on its queue
if and only if its effects are not committed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from onceward.connectors import DatabaseBusyError
from tests.crash.inbox.worker import TARGET, joint_queue
from tests.support.inbox.site import SHORT_LEASE, InboxSite, freeze, stop, thaw
from tests.support.own_postgres import own_postgres
from tests.support.wait import until

EVENTS = ["before", TARGET, "behind"]
THREADS, ASYNCIO = False, True


class JointSite(InboxSite):
    """Its only queue is in its database."""

    def queue(self, name: str = "queue.db") -> Any:
        if name not in self._queues:
            self._queues[name] = joint_queue(self.url, self.connect_args, asynchronous=False)
        return self._queues[name]

    def start(self, name: str = "worker", **orders: Any) -> ForkServerProcess:
        return super().start(name, joint=True, **orders)

    def credits(self) -> int:
        """How many effects there are; 0 while the server does not answer."""
        with suppress(OperationalError):
            return int(self.ask("SELECT count(*) FROM credits")[0][0])
        return 0

    def is_empty(self) -> bool:
        with suppress(OperationalError, DatabaseBusyError):
            return self.is_drained()
        return False

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
        super().close()


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JointSite]:
    with JointSite.on(request, tmp_path) as made:
        yield made


@pytest.fixture
def postgresql(tmp_path: Path, postgres_url: str) -> Iterator[JointSite]:
    with JointSite.on_postgresql(tmp_path, postgres_url) as made:
        yield made


def waiting(site: JointSite) -> int:
    table = "onceward_queue_orders_messages" if site.is_sqlite else "onceward_queue_messages"
    [(number,)] = site.ask(f"SELECT count(*) FROM {table}")
    return int(number)


@pytest.mark.req("PG-08", "PG-11")
@pytest.mark.parametrize(
    ("point", "mode", "asynchronous"),
    [
        ("fetched", "transactional", THREADS),
        ("written", "transactional", ASYNCIO),
        ("removed", "transactional", THREADS),
        ("removed", "transactional", ASYNCIO),
        ("committed", "transactional", THREADS),
        ("committed", "transactional", ASYNCIO),
        ("settled", "effectful", THREADS),
        ("removed", "effectful", THREADS),
        ("committed", "effectful", ASYNCIO),
    ],
)
def test_killed_at_any_point_a_message_is_gone_if_and_only_if_its_effects_are_there(
    site: JointSite, point: str, mode: str, asynchronous: bool
) -> None:
    orders: dict[str, Any] = {"mode": mode, "asynchronous": asynchronous}
    site.send(*EVENTS)
    site.dies(point=point, **orders)
    done = site.effects()
    assert done[TARGET] == (point == "committed")
    assert waiting(site) == len(EVENTS) - len(done)

    site.drain(**orders)
    assert site.effects() == Counter(EVENTS)
    assert site.said("handling", by="restarted").count(TARGET) == (point != "committed")
    reports = site.reports()
    assert (reports["failed"], reports["duplicates"]) == (0, 0), "no delivery was for nothing"
    assert site.dead_letters() == []
    if mode == "effectful":
        assert site.charges() == Counter(EVENTS)


@pytest.mark.req("PG-08", "PG-13")
@pytest.mark.parametrize("point", ["written", "removed", "committed"])
@pytest.mark.parametrize("asynchronous", [THREADS, ASYNCIO], ids=["threads", "asyncio"])
def test_killed_inside_a_group_all_of_it_is_on_the_queue_and_right_after_it_none(
    postgresql: JointSite, point: str, asynchronous: bool
) -> None:
    site = postgresql
    events = [f"event-{number}" for number in range(20)]
    events[9] = TARGET
    orders: dict[str, Any] = {"commit": "group", "asynchronous": asynchronous, "batch": 20}
    site.send(*events)
    site.dies(point=point, **orders)
    done = site.effects()
    assert done[TARGET] == (point == "committed")
    assert waiting(site) == len(events) - len(done)
    if point == "committed":
        assert site.ask("SELECT max(ended) > 1 FROM onceward_queue_log") == [(True,)], "it was in a group"
    else:
        assert len(site.said("handling", by="doomed")) > len(done) + 1, "it was in a group"

    site.drain(**orders)
    assert site.effects() == Counter(events)
    assert set(site.said("handling", by="restarted")) == set(events) - set(done)
    reports = site.reports()
    assert (reports["failed"], reports["duplicates"]) == (0, 0), "no delivery was for nothing"
    assert site.ask("SELECT sum(ended) FROM onceward_queue_log") == [(len(events),)]
    assert site.dead_letters() == []


@pytest.mark.req("PG-07")
def test_a_worker_that_was_frozen_past_its_lease_commits_nothing(postgresql: JointSite) -> None:
    """In SQLite nobody else gets the message meanwhile: the worker holds the only lock."""
    site = postgresql
    site.send(TARGET)
    zombie = site.start("zombie", point="written", waits=True, lease=SHORT_LEASE)
    until(lambda: site.said("reached", by="zombie"))
    freeze(zombie)
    [(token,)] = site.ask("SELECT token FROM onceward_queue_messages")
    other = site.start("other", lease=5.0)
    until(lambda: site.ask("SELECT token FROM onceward_queue_messages") != [(token,)])
    site.go()
    thaw(zombie)
    until(site.is_drained)
    stop(zombie, other)
    assert site.effects() == Counter([TARGET])
    [(worker,)] = site.ask("SELECT worker FROM credits")
    # The other may find the record locked, and leave the message to a later delivery, which the thawed one may get.
    assert worker == "other" or site.said("handling", by="zombie").count(TARGET) > 1
    assert "this attempt commits nothing" in site.log("zombie")
    assert site.dead_letters() == []


@pytest.mark.req("PG-11")
def test_a_handler_that_takes_longer_than_a_lease_keeps_its_messages_in_sqlite(tmp_path: Path) -> None:
    """It holds the only lock, so its worker cannot extend a lease meanwhile, and nobody can take what is leased."""
    with JointSite.on_sqlite(tmp_path) as site:
        site.send("one", "two", "three")
        workers = [site.start(name, lease=0.9, takes=1.5, slots=2, batch=2) for name in ("a", "b")]
        until(site.is_empty)
        stop(*workers)
        assert site.effects() == Counter(["one", "two", "three"])
        assert site.dead_letters() == []


@pytest.mark.req("PG-08")
def test_its_server_restarted_under_load(tmp_path: Path) -> None:
    """Nothing is lost, nothing doubled, nothing dead-lettered."""
    ids = [f"event-{number}" for number in range(600)]
    with own_postgres() as server, JointSite.on_postgresql(tmp_path, server.url) as site:
        workers = [site.start(name, slots=4, lease=5.0) for name in ("one", "two")]
        until(lambda: all(site.said("ready", by=name) for name in ("one", "two")))  # one that starts needs it
        site.send(*ids)
        until(lambda: site.credits() >= 0.2 * len(ids))
        server.control("restart", "-m", "fast")
        until(lambda: site.credits() >= 0.5 * len(ids))
        server.control("stop", "-m", "immediate")
        time.sleep(0.5)
        server.start()
        until(site.is_empty)
        stop(*workers)
        assert site.effects() == Counter(ids)
        assert site.dead_letters() == []
