"""`onceward.testing.app` waits for outages, limits and retries on the clock of the test, not on the real one."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from onceward import Limit, Onceward, outage, retry, testing
from onceward.testing import harness
from tests.support.orm_shop import contract


class ProviderDown(Exception):
    pass


class Provider:
    """A shop whose provider is up or down."""

    def __init__(self, **more: Any) -> None:
        self.up = False
        self.calls: list[Any] = []
        self.app = app = Onceward("shop", database="postgresql://nobody@localhost:1/shop", **more)

        @app.consumer(
            "redis://localhost:1/orders?group=pay",
            contract=contract(consumer_id="pay"),
            failures={ProviderDown: outage(probe_every="10s")},
        )
        def pay(order: dict[str, Any], session: Any) -> None:
            self.calls.append(order["id"])
            if order["id"] < 0:
                raise ValueError("what is this?")
            if not self.up:
                raise ProviderDown("HTTP 503")

        self.pay = pay


@pytest.fixture
def shop() -> Provider:
    return Provider()


@pytest.mark.req("IN-23")
def test_an_outage_is_waited_out_and_nothing_is_lost(shop: Provider) -> None:
    with testing.app(shop.app) as t:
        for number in range(20):
            t.send(shop.pay, {"id": number})
        t.send(shop.pay, {"id": -1})
        t.drain()
        assert len(shop.calls) == 3, "three different messages in a row make an outage"
        began = time.process_time()
        t.advance("1h")
        probes = len(shop.calls) - 3
        assert 80 <= probes <= 400, "one after 10 s, then every 30 s"
        assert not t.dead_letters
        shop.up = True
        assert t.advance("1m").succeeded == 20
        t.advance("2h")
        assert [each.consumer for each in t.dead_letters] == ["pay"], "only the one that fails by itself"
        assert time.process_time() - began < 10


@pytest.mark.req("IN-23")
def test_an_outage_of_days_takes_no_more_probes_than_one_of_hours(
    shop: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "MOST_PROBES", 50)
    with testing.app(shop.app) as t:
        for number in range(3):
            t.send(shop.pay, {"id": number})
        t.advance("30d")
        assert len(shop.calls) <= 3 + 50 + 5
        assert not t.dead_letters
        shop.up = True
        assert t.advance("1m").succeeded == 3, "as soon as without the wait"


@pytest.mark.req("IN-23", "OU-02")
def test_the_date_of_a_retry_after_is_one_of_the_test() -> None:
    app, calls = Onceward("shop", database="postgresql://nobody@localhost:1/shop"), []

    @app.consumer("redis://localhost:1/orders?group=pay", contract=None)
    def pay(order: dict[str, Any]) -> None:
        calls.append(order["id"])
        if t.now < up_at:
            request = httpx.Request("GET", "http://localhost")
            header = {"Retry-After": format_datetime(up_at, usegmt=True)}
            httpx.Response(503, headers=header, request=request).raise_for_status()

    with testing.app(app) as t:
        up_at = t.now + timedelta(minutes=30)
        for number in range(10):
            t.send(pay, {"id": number})
        t.advance("29m")
        assert len(calls) == 3, "the service said when to come back"
        assert t.advance("5m").succeeded == 10


@pytest.mark.req("IN-23")
def test_a_test_does_not_see_the_outage_of_another(shop: Provider) -> None:
    for _ in range(2):
        with testing.app(shop.app) as t:
            shop.calls.clear()
            for number in range(2):
                t.send(shop.pay, {"id": number})
            t.drain()
            assert len(shop.calls) == 2, "two are not enough for an outage"
    with testing.app(shop.app) as t:
        for number in range(10):
            t.send(shop.pay, {"id": number})
        t.drain()
    with testing.app(shop.app) as t:
        shop.up = True
        t.send(shop.pay, {"id": 1})
        assert t.drain().succeeded == 1


@pytest.mark.req("IN-23")
def test_a_rate_passes_with_the_time_of_the_test() -> None:
    app, seen = Onceward("shop", database="postgresql://nobody@localhost:1/shop"), []

    @app.consumer("redis://localhost:1/orders?group=pay", contract=None, limit=Limit(rate="1/m"))
    def pay(order: dict[str, Any]) -> None:
        seen.append(order["id"])

    @app.consumer("redis://localhost:1/mails?group=mail", contract=None, limit=Limit(concurrency=2))
    async def mail(order: dict[str, Any]) -> None:
        await asyncio.sleep(0.001)
        seen.append("mail")

    began = time.process_time()
    with testing.app(app) as t:
        for number in range(10):
            t.send(pay, {"id": number})
            t.send(mail, {"id": number})
        assert t.drain().succeeded == 11
        assert seen.count("mail") == 10
        assert t.advance("50s").succeeded == 0
        assert t.advance("20s").succeeded == 1
        assert t.advance("1h").succeeded == 8
    assert sorted(each for each in seen if each != "mail") == list(range(10))
    assert time.process_time() - began < 10


@pytest.mark.req("IN-23")
def test_a_fast_rate_is_nearly_right_in_a_test() -> None:
    app, seen = Onceward("shop", database="postgresql://nobody@localhost:1/shop"), []

    @app.consumer("redis://localhost:1/orders?group=pay", contract=None, limit=Limit(rate="5/s"))
    def pay(order: dict[str, Any]) -> None:
        seen.append(order["id"])

    with testing.app(app) as t:
        for number in range(200):
            t.send(pay, {"id": number})
        t.advance("10s")
        assert 40 <= len(seen) <= 51


@pytest.mark.req("IN-23")
def test_short_retries_are_soon_over() -> None:
    app, calls = Onceward("shop", database="postgresql://nobody@localhost:1/shop"), []

    @app.consumer(
        "redis://localhost:1/orders?group=pay&max_deliveries=101",
        contract=None,
        failures={ValueError: retry("1s", times=100)},
    )
    def pay(order: dict[str, Any]) -> None:
        calls.append(order["id"])
        raise ValueError

    began = time.process_time()
    with testing.app(app) as t:
        t.send(pay, {"id": 1})
        t.advance("10m")
        assert (len(calls), len(t.dead_letters)) == (101, 1)
    assert time.process_time() - began < 6
