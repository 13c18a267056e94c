"""Gauges of `/metrics`: what waits in sources and the database, and that a source which is down holds up nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from onceward import Inbox, Onceward
from onceward.boundary.metrics import BoundaryMetrics
from onceward.connectors.memory import MemoryConnector
from onceward.connectors.urls import Address
from onceward.run import samples as sampling
from onceward.run.samples import Reading
from onceward.testing.servers import nats_server, postgres_server, redis_server
from onceward.transaction import Settlement, Transaction, Verdict
from tests.support.boundary.server import boundary_server
from tests.support.run.world import Site
from tests.support.wait import until

APP = """
import time
from pathlib import Path
from onceward import Contract, ExceptionCategory, Onceward, TransactionException

app = Onceward("shop", database="sqlite:///shop.db")
contract = Contract(
    consumer_id="billing", event_types=["paid"], owner_team="money", idempotency_mechanism="bill and dedup row"
)
POLICY = {
    "loop": {
        "empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}, "concurrency": {"value": 1}, "batch": {"size": 1},
        "mode": "batch",  # the next handler holds the database while it waits
    },
    "steps": {"process": {"retry": {"max_attempts": 1}}},
}


@app.consumer("sqlite:///orders.db", contract=contract, policy=POLICY)
def charge(order: dict, session) -> None:
    if order.get("bad"):
        raise TransactionException("no such customer", category=ExceptionCategory.BUSINESS)
    while Path("wait").exists():
        time.sleep(0.02)


@app.consumer("redis://127.0.0.1:PORT/away", policy=POLICY)
def away(order: dict) -> None: ...
"""
PORT = ("--health", "127.0.0.1:0")


def values(page: str) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels, except the worker."""
    return {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name != "worker"),
        ): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@pytest.mark.req("UI-01", "UI-03")
def test_a_run_shows_what_waits_and_a_source_that_hangs_holds_up_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        site = Site(tmp_path)
        (tmp_path / "shop.py").write_text(APP.replace("PORT", str(silent.getsockname()[1])))
        (tmp_path / "wait").touch()
        orders = [{"id": "bad", "bad": True}, {"id": "a"}, {"id": "b"}, {"id": "c"}]
        with site.queue() as queue:
            sent = [
                Transaction(id=each["id"], payload=each, metadata={"event_type": "paid"}) for each in orders
            ]
            queue.dispatch_transactions(sent)
        with site.run(*PORT, ONCEWARD_SAMPLE_EVERY="0.1") as run:

            def now() -> dict[tuple[str, ...], float]:
                assert run.url  # it has started
                began = time.monotonic()
                page = run.get("/metrics")[1]
                assert time.monotonic() - began < 5
                return values(page)

            until(lambda: now().get(("onceward_dead_letters", "business", "charge")) == 1)
            until(lambda: now().get(("onceward_source_in_flight", "charge")) == 1)
            shown = now()
            assert shown["onceward_source_waiting", "charge"] == 2
            assert shown["onceward_source_delayed", "charge"] == 0
            assert shown["onceward_source_up", "charge"] == 1
            assert 0 < shown["onceward_source_oldest_age_seconds", "charge"] < 300
            assert shown["onceward_source_sample_age_seconds", "charge"] < 60
            assert shown["onceward_consumer_parked", "charge"] == 0
            assert shown["onceward_dead_letters", "poison", "charge"] == 0
            assert shown["onceward_consumer_outage", "charge"] == 0
            assert shown["onceward_consumer_attempts_total", "charge", "failed"] == 1
            assert shown["onceward_pool_in_use", "threads"] <= shown["onceward_pool_size", "threads"]
            assert ("onceward_source_waiting", "away") not in shown
            until(lambda: now().get(("onceward_source_up", "away")) == 0)
            (tmp_path / "wait").unlink()
            until(lambda: now()["onceward_source_waiting", "charge"] == 0)
            until(lambda: now()["onceward_source_oldest_age_seconds", "charge"] == 0)


OUTBOX = """
from onceward import Onceward

app = Onceward("shop", database="sqlite:///shop.db")


@app.consumer("sqlite:///orders.db", contract=None)
def charge(order: dict) -> None: ...
"""


@pytest.mark.req("UI-01", "OB-16")
def test_a_run_shows_what_waits_in_the_outbox_while_nothing_relays_it(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (tmp_path / "shop.py").write_text(OUTBOX)
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    engine = app.create_engine()
    Inbox(engine).migrate()

    def send(*orders: int) -> None:
        with engine.begin() as connection:
            for order in orders:
                app.outbox(connection).send("sqlite:///orders.db", {"id": order})

    send(1, 2, 3)
    quick = {"ONCEWARD_SAMPLE_EVERY": "0.1"}
    with site.run(*PORT, ONCEWARD_RELAY="false", **quick) as run:
        assert run.url  # it has started
        until(lambda: "onceward_outbox_waiting 3.0" in run.get("/metrics")[1])
        send(4)
        until(lambda: "onceward_outbox_waiting 4.0" in run.get("/metrics")[1])
        shown = values(run.get("/metrics")[1])
        assert 0 < shown["onceward_outbox_oldest_waiting_seconds",] < 300
    with site.run(*PORT, **quick) as run:
        assert run.url
        until(lambda: "onceward_outbox_waiting 0.0" in run.get("/metrics")[1])
        assert values(run.get("/metrics")[1])["onceward_outbox_oldest_waiting_seconds",] == 0
    engine.dispose()


@pytest.mark.req("UI-03")
def test_an_old_number_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(5, time.monotonic() - 10, "it does not answer")
    assert reading.current == 5
    assert reading.age is not None
    assert reading.age >= 10
    monkeypatch.setattr(sampling, "FORGOTTEN_AFTER", 5.0)
    assert reading.current is None


# ── every source ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def source(kind: str, directory: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{directory}/orders.db"
    elif kind == "redis":
        with redis_server() as redis:
            yield f"{redis.url}/orders"
    elif kind == "postgresql":
        with postgres_server() as postgres:
            yield (
                f"{postgres.url}?queue=orders" if "?" not in postgres.url else f"{postgres.url}&queue=orders"
            )
    elif kind == "nats":
        with nats_server() as nats:
            yield f"{nats.url}/ORDERS"
    else:
        with boundary_server(directory) as url:
            yield f"boundary+{url}?consumer=billing"


@pytest.mark.req("UI-01")
@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgresql", "nats", "boundary"])
def test_every_source_tells_what_waits_without_reading_it(kind: str, tmp_path: Path) -> None:
    with source(kind, tmp_path) as url:
        address = Address(url)
        assert address.backlog().waiting == 0
        sink = (
            Address(f"{url.partition('?')[0]}?from_zone=a&to_zone=b", sink=True)
            if kind == "boundary"
            else address
        )
        with sink.open(asynchronous=False) as queue:
            payloads = [{"subject": "order:1", "predicate": "placed", "object": {"n": n}} for n in range(3)]
            queue.dispatch_transactions([Transaction(payload=payload) for payload in payloads])
        with address.open(asynchronous=False) as queue:
            until(lambda: address.backlog().waiting == 3)
            [first] = queue.fetch_transactions(1)
            before = address.backlog()
            assert before.waiting == (3 if kind == "boundary" else 2)
            assert before.in_flight == (None if kind == "boundary" else 1)
            assert before.oldest_age is None or 0 <= before.oldest_age < 300
            queue.settle_transactions([Settlement(first, Verdict.DONE)])
            until(lambda: (address.backlog().in_flight or 0) == 0)
            assert address.backlog().waiting == 2
            for each in queue.fetch_transactions(2):
                queue.settle_transactions([Settlement(each, Verdict.DONE)])
            until(lambda: address.backlog().waiting == 0)
            until(lambda: address.backlog().oldest_age == 0)


def test_a_source_that_cannot_tell_says_nothing() -> None:
    with MemoryConnector():
        found: Any = Address("memory://orders").backlog()
    assert (found.waiting, found.in_flight, found.oldest_age) == (None, None, None)


# ── a boundary ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("UI-04")
def test_the_old_names_of_a_boundary_have_the_same_numbers() -> None:
    metrics = BoundaryMetrics()
    metrics.appends.inc(3)
    metrics.backlog.labels("billing").set(7)
    shown = values(metrics.text().decode())
    assert shown["onceward_boundary_append_requests_total",] == shown["bsfg_append_requests_total",] == 3
    assert (
        shown["onceward_boundary_consumer_backlog", "billing"]
        == shown["bsfg_consumer_backlog", "billing"]
        == 7
    )
    old = {name for name, *_ in shown if name.startswith("bsfg_")}
    assert {name.replace("bsfg_", "onceward_boundary_", 1) for name in old} <= {name for name, *_ in shown}
