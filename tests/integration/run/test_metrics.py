"""`/metrics` of a run without an OpenTelemetry SDK: duplicates, latency and retries of each consumer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from onceward.connectors import SqliteConnector
from onceward.transaction import Transaction
from tests.support.run.world import Site
from tests.support.wait import until

PORT = ("--health", "127.0.0.1:0")
APP = """
import os
from onceward import Contract, Onceward

app = Onceward("shop", database="sqlite:///shop.db")
contract = Contract(
    consumer_id="billing", event_types=["paid"], owner_team="money", idempotency_mechanism="bill and dedup row"
)
failed = set()
POLICY = {"loop": {"empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}},
    "steps": {"process": {"retry": {"max_attempts": 3, "backoff": 0}}}}


@app.consumer("sqlite:///orders.db", contract=contract, policy=POLICY)
def charge(order: dict, session) -> None:
    if order.get("twice") and order["id"] not in failed:
        failed.add(order["id"])
        raise RuntimeError("the first time")


@app.consumer("sqlite:///plain.db", policy=POLICY)
async def plain(order: dict) -> None:
    if order.get("twice") and order["id"] not in failed:
        failed.add(order["id"])
        raise RuntimeError("the first time")
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A consumer with a contract in threads, one without in asyncio."""
    made = Site(tmp_path)
    (tmp_path / "shop.py").write_text(APP)
    return made


def samples(page: str) -> dict[tuple[str, str, str], float]:
    """Every sample by name, consumer and what else distinguishes it. The parser refuses what is not valid."""
    found = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = dict(sample.labels)
            consumer = labels.pop("consumer", "")
            key = (sample.name, consumer, labels.get("outcome") or labels.get("le") or "")
            found[key] = found.get(key, 0.0) + sample.value
    return found


def send(site: Site, file: str, *orders: dict[str, Any]) -> None:
    with SqliteConnector(site.directory / file) as queue:
        queue.dispatch_transactions(
            [Transaction(id=order["id"], payload=order, metadata={"event_type": "paid"}) for order in orders]
        )


@pytest.mark.req("CC-079")
def test_duplicates_latency_and_retries_survive_the_death_of_a_worker(site: Site) -> None:
    send(site, "orders.db", {"id": "a"}, {"id": "b", "twice": True}, {"id": "a"})
    send(site, "plain.db", {"id": "c"}, {"id": "d", "twice": True})
    with site.run(*PORT, "--processes", "2") as run:

        def value(name: str, consumer: str, more: str = "") -> float:
            return samples(run.get("/metrics")[1]).get((f"onceward_consumer_{name}", consumer, more), -1.0)

        until(lambda: value("duplicates_total", "charge") == 1 and value("retries_count", "charge") == 2)
        until(lambda: value("retries_count", "plain") == 2)
        before = samples(run.get("/metrics")[1])
        assert value("attempts_total", "charge", "done") == 2
        assert value("attempts_total", "charge", "failed") == 1
        for consumer, attempts in (("charge", 4), ("plain", 3)):
            assert value("retries_bucket", consumer, "0") == 1
            assert value("retries_bucket", consumer, "1") == 2
            assert value("retries_sum", consumer) == 1
            assert value("duration_seconds_count", consumer) == attempts
            assert value("duration_seconds_bucket", consumer, "+Inf") == attempts
            assert 0 < value("duration_seconds_sum", consumer) < 60
        until(lambda: value("succeeded_total", "charge") == 3)
        for pid in run.workers():
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(run.workers()) >= 4)
        until(run.is_ready)
        after = samples(run.get("/metrics")[1])
        for key, count in before.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert after[key] >= count, key
        send(site, "orders.db", {"id": "a"})
        until(lambda: value("duplicates_total", "charge") == 2)
