"""Outside calls of which nobody knows whether they happened get home through the browser alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Shop
from tests.browser.test_operator import put, redrive
from tests.support.browser import watched
from tests.support.wait import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SHOP = """
from datetime import timedelta
from pathlib import Path
from onceward import Contract, Onceward

app = Onceward("shop", database="sqlite:///shop.db")
contract = Contract(
    consumer_id="paying", event_types=["*"], owner_team="money", idempotency_mechanism="key", mode="effectful", lease=5
)
POLICY = {"loop": {"empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}}}


@app.consumer("sqlite:///orders.db?lease=5&redelivery_delay=0.05", contract=contract, policy=POLICY)
def pay(order: dict, session) -> None:
    def call(key: str) -> dict:
        with Path("calls.txt").open("a") as lines:
            lines.write(f"{order['id']}\\n")
        if not Path("fixed").exists():
            raise ValueError("the provider answered with a page of HTML")
        return {"charge": "called"}

    charge = session.effect("charge-card", call, key_valid_for=timedelta(milliseconds=1))
    session.execute("INSERT INTO bills (id) VALUES (:id)", {"id": f"{order['id']} {charge['charge']}"})
"""


@pytest.mark.req("UI-22", "UI-33")
def test_a_call_in_doubt_gets_home_with_the_answer_of_its_provider(shop: Shop, chromium: Browser) -> None:
    (shop.directory / "shop.py").write_text(SHOP)
    put(shop.directory, "orders.db", {"id": "order-1"}, {"id": "order-2"})
    with shop.serve() as (_, url), watched(chromium, url) as operator:
        page = operator.page
        until(lambda: shop.has_letters(2))
        shop.fix()
        page.goto(f"{url}/letters")
        page.click("table.groups a")
        assert "record what the provider says" in page.inner_text("main")
        group = page.url
        for id, result, button in (
            ("order-1", '{"charge": "ch_1"}', "It happened"),
            ("order-2", "", "It did not happen"),
        ):
            page.goto(group)
            page.click(f"tr:has(td:text-is('{id}')) a")
            operator.check_page()
            page.fill("[name=reason]:visible", "in the provider's log")
            page.fill("[name=result]", result)
            page.click(f"button:text-is('{button}')")
            page.wait_for_selector("text=The answer is recorded")
            assert page.locator("button:text-is('It happened')").count() == 0
        redrive(page, url, "whether effect")
        until(lambda: sorted(shop.bills()) == ["order-1 ch_1", "order-2 called"])
        calls = (shop.directory / "calls.txt").read_text().split()
        assert (calls.count("order-1"), calls.count("order-2")) == (1, 2)
        until(lambda: shop.letters() == 0)
        page.goto(f"{url}/audit")
        assert page.inner_text("main").count("resolve effect") == 2
        operator.check_page()
