"""Thousands of dead letters: pages answer at once, and a redrive is a few clicks away."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import pytest

from onceward.connectors.codec import encode
from onceward.deadletters import Burial, Category, DeadLetters
from onceward.transaction import Transaction
from tests.browser.conftest import Shop
from tests.support.browser import watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FIRST_GROUP = "table.groups tbody tr:first-child a"


def bury(shop: Shop, number: int) -> DeadLetters:
    letters = DeadLetters(shop.engine)
    letters.migrate()
    for first in range(0, number, 5000):
        letters.bury(
            *(
                Burial(
                    consumer="billing",
                    origin="sqlite:///orders.db",
                    message_id=f"order-{each}",
                    body=encode(
                        Transaction(id=f"order-{each}", payload={"id": f"order-{each}", "note": "x" * 500})
                    ),
                    category=Category.BUSINESS,
                    reason="failed",
                    error=f"BUSINESS [order-{each}]: order-{each} has no {('currency', 'total', 'tax')[each % 3]}",
                    attempts=1,
                    event_type="order.placed",
                )
                for each in range(first, min(first + 5000, number))
            )
        )
    return letters


def p95(call: Callable[[], object], times: int = 20) -> float:
    """Of the best of three rounds: a busy machine is slow, which is not a failure."""
    return min(quantiles([_seconds(call) for _ in range(times)], n=20)[-1] for _ in range(3))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@pytest.mark.req("UI-13")
@pytest.mark.parametrize("number", [3_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_with_many_letters_a_page_shows_some_and_takes_less_than_300_ms(shop: Shop, number: int) -> None:
    letters = bury(shop, number)
    with shop.console() as url:
        group = letters.groups()[0]

        def get(path: str) -> str:
            with urlopen(Request(f"{url}{path}", headers={"accept": "text/html"}), timeout=30) as answer:
                page: str = answer.read().decode()
                return page

        assert f"{number:,} in 3 groups" in get("/letters")
        one = f"/letters/group?consumer=billing&event_type=order.placed&group={group.group}&status=open"
        page = get(one)
        assert f"{group.letters:,} letters" in page
        assert page.count('href="/letters/') <= 100, "a page does not grow with the group"
        if number < 100_000:
            return  # a busy machine is slow; the long one measures
        measured = {
            path: p95(lambda path=path: get(path))
            for path in ("/", "/letters", one, "/letters/50000", "/audit")
        }
    assert max(measured.values()) < 0.3, measured


@pytest.mark.long
@pytest.mark.req("UI-12")
def test_ten_thousand_letters_are_redriven_in_five_clicks_and_a_minute(shop: Shop, chromium: Browser) -> None:
    bury(shop, 30_000)
    shop.fix()
    with shop.serve() as (_, url), watched(chromium, url) as operator:
        operator.page.goto(url)
        operator.page.wait_for_selector("text=running")
        began = time.monotonic()
        operator.click("nav >> text=Dead letters")
        operator.click(FIRST_GROUP)
        operator.click("button:has-text('Dry run')")
        operator.page.wait_for_selector(".dry.good")
        operator.page.fill("[name=root_cause]", "no currency")
        operator.page.fill("[name=fix_ref]", "release 2")
        operator.click("button:has-text('Redrive')")
        operator.page.wait_for_selector("text=10,000 letters of billing")
        assert time.monotonic() - began < 60
        assert operator.clicks <= 5
