"""Queues in PostgreSQL and JetStream behind a wire that fails: nothing is lost, and what is done does not return."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from sqlalchemy import make_url

from onceward import Transaction
from onceward.connectors.jetstream import JetStreamConnector
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.testing.servers import nats_server
from onceward.transaction import Settlement, Verdict
from tests.support.proxy import TcpProxy, WireFault, proxy_to
from tests.support.wait import LIMIT

pytestmark = pytest.mark.timeout(120)

AT = range(5)
"""Requests at which the wire fails, of a dispatch, and of a fetch and its acknowledgment: more than they need."""
RULES: dict[str, Any] = {"lease": 1.0, "max_deliveries": 1000}

Opened = tuple[TcpProxy, Callable[[], Any]]


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with nats_server() as server:
        yield server.url


@pytest.fixture(params=["postgresql", "jetstream"])
def queue(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """The wire, and a function that opens a connector behind it."""
    name = f"q-{uuid4().hex}"
    if request.param == "postgresql":
        url = make_url(request.getfixturevalue("postgres_url"))
        host = url.host or str(url.query["host"])
        with proxy_to(host, url.port or 5432) as line:
            behind = url.set(**line.address).difference_update_query(["host"])
            yield line, lambda: PostgreSqlConnector(behind, name, **RULES)
        return
    to = urlsplit(request.getfixturevalue("nats_url"))
    with proxy_to(to.hostname or "127.0.0.1", to.port or 4222) as line:
        yield line, lambda: JetStreamConnector(f"nats://127.0.0.1:{line.port}", name, **RULES)


@pytest.mark.req("ST-13")
@pytest.mark.parametrize("fault", list(WireFault))
def test_a_queue_loses_nothing_wherever_its_connection_fails(queue: Opened, fault: WireFault) -> None:
    line, open_queue = queue
    connector = open_queue()
    retry(lambda: connector.dispatch_transactions([Transaction(id="first")]))
    retry(lambda: settle(connector, connector.fetch_transactions(1)))
    certain: set[str] = set()
    acknowledged: set[str] = set()
    try:
        for at in AT:
            id_ = f"m{at}"
            line.strike(fault, at)
            if retry(lambda id_=id_: connector.dispatch_transactions([Transaction(id=id_)])) == 0:  # type: ignore[misc]
                certain.add(id_)  # it was sent once
            until = time.monotonic() + LIMIT
            line.strike(fault, at)
            while id_ not in acknowledged:
                assert time.monotonic() < until
                take(connector, certain, acknowledged)
        assert line.struck >= 3
        assert acknowledged == {f"m{at}" for at in AT}
        assert sum(retry_result(connector.counts).values()) <= len(AT)  # copies of a repeated dispatch
    finally:
        connector.close()


def take(connector: Any, certain: set[str], acknowledged: set[str]) -> None:
    """Fetch and acknowledge what there is. What a failed fetch has taken comes back when its lease expires."""
    try:
        batch = connector.fetch_transactions(3)
    except Exception:  # the wire has failed
        time.sleep(0.02)
        return
    again = {each.id for each in batch} & certain & acknowledged
    assert not again, f"{again} came back after they were acknowledged"
    retry(lambda: settle(connector, batch))
    acknowledged |= {each.id for each in batch}


def settle(connector: Any, batch: Any) -> None:
    connector.settle_transactions([Settlement(each, Verdict.DONE) for each in batch])


def retry(call: Callable[[], object]) -> int:
    """Call it until it succeeds. Return how often it failed."""
    end = time.monotonic() + LIMIT
    failures = 0
    while True:
        try:
            call()
            return failures
        except Exception:
            if time.monotonic() > end:
                raise
            failures += 1
            time.sleep(0.02)


def retry_result(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    retry(lambda: found.append(call()))
    return found[0]
