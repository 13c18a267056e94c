"""A relay whose connection to PostgreSQL fails at every single request: all arrives, in order, and is recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, make_url

from onceward.outbox.relay import Relay
from tests.support.outbox import QUICK, OutboxWorld, Sink, outbox_on_postgresql, turn
from tests.support.proxy import TcpProxy, WireFault, proxy_to
from tests.support.wait import LIMIT

pytestmark = pytest.mark.timeout(120)

AT = range(6)
"""More requests than a turn of the relay needs."""


@pytest.fixture
def world(postgres_url: str) -> Iterator[OutboxWorld]:
    with outbox_on_postgresql(postgres_url) as made:
        yield made


@pytest.fixture
def line(world: OutboxWorld) -> Iterator[TcpProxy]:
    url = world.engine.url
    with proxy_to(url.host or str(url.query["host"]), url.port or 5432) as made:
        yield made


@pytest.mark.req("ST-13")
@pytest.mark.parametrize("fault", list(WireFault))
def test_a_relay_publishes_everything_wherever_its_connection_fails(
    world: OutboxWorld, line: TcpProxy, fault: WireFault
) -> None:
    behind = make_url(world.engine.url).set(**line.address).difference_update_query(["host"])
    engine = create_engine(behind)
    relay = Relay(engine, lambda _: world.sink, lease=0.5, rules=QUICK)  # type: ignore[arg-type, return-value]
    try:
        for at in AT:
            world.send(f"{at}-1", f"{at}-2", key="k")
            line.strike(fault, at)
            publish_all(world, relay)
        assert line.struck >= len(AT) - 1
    finally:
        relay.close()
        engine.dispose()
    assert set(world.rows()) == {"published"}
    assert first_arrivals(world.sink) == [f"{at}-{number}" for at in AT for number in (1, 2)]


def publish_all(world: OutboxWorld, relay: Relay) -> None:
    until = time.monotonic() + LIMIT
    while set(world.rows()) != {"published"}:
        assert time.monotonic() < until
        try:
            turn(relay)
        except Exception:  # the wire has failed: its claims come back
            relay._claims.clear()
            relay._endings.clear()


def first_arrivals(sink: Sink) -> list[str]:
    return list(dict.fromkeys(sink.payloads))
