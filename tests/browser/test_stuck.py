"""A handler hangs without a time limit, inside its transaction on SQLite: an operator ends its process in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Shop
from tests.support.browser import watched
from tests.support.wait import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SHOP = """
import time
from pathlib import Path
from onceward import Contract, Onceward

app = Onceward("shop", database="sqlite:///shop.db")
contract = Contract(
    consumer_id="billing", event_types=["*"], owner_team="money", idempotency_mechanism="row", lease=600
)
POLICY = {"loop": {"concurrency": {"value": 2}, "empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}}}


@app.consumer("sqlite:///orders.db?lease=600", contract=contract, policy=POLICY)
def charge(order: dict, session) -> None:
    session.execute("INSERT INTO bills (id) VALUES (:id)", {"id": order["id"]})
    while "hangs" in order and not Path("fixed").exists():
        wait_for_the_bank()


def wait_for_the_bank() -> None:
    time.sleep(0.05)
"""


@pytest.mark.req("UI-22", "UI-30")
def test_an_operator_frees_a_handler_that_hangs_without_a_time_limit(shop: Shop, chromium: Browser) -> None:
    (shop.directory / "shop.py").write_text(SHOP)
    with shop.serve() as (run, url), watched(chromium, url) as operator:
        page = operator.page
        until(run.workers)
        shop.place({"id": "order-1", "hangs": True}, {"id": "order-2"})
        page.goto(f"{url}/consumers/charge")
        until(lambda: page.reload() and page.locator("text=End its worker process").count())
        page.click("text=End its worker process")
        page.wait_for_selector("h1:has-text('End the process of worker 1?')")
        shown = page.inner_text("main")
        assert "order-1" in shown
        assert "That is after 3 starts of charge." in shown
        operator.check_page()
        page.fill("[name=reason]", "the bank hangs")
        page.check("[name=pause]")
        page.click("button:has-text('End its worker process')")
        page.wait_for_selector("text=The process was asked to end")
        [first] = run.workers()
        until(lambda: len(run.workers()) == 2)  # the successor waits for the pause
        until(lambda: page.reload() and page.locator("text=Paused by").count())
        assert shop.bills().count("order-1") == 0, "what it wrote is undone"
        (shop.directory / "fixed").touch()
        page.fill("[name=reason]", "the bank answers")
        page.click("button:has-text('Resume')")
        page.wait_for_selector("text=It is resumed.")
        until(lambda: sorted(shop.bills()) == ["order-1", "order-2"])
        page.goto(f"{url}/audit")
        shown = page.inner_text("main")
        assert "end worker" in shown.replace("_", " ")
        assert str(first) in shown.replace(",", "")
        page.goto(f"{url}/consumers/charge")
        page.click("text=Check now")
        page.wait_for_selector("section:has-text('Balance') .verdict.holds")


@pytest.mark.req("UI-06", "UI-31")
def test_a_page_that_cannot_be_kept_current_is_loaded_again(shop: Shop, chromium: Browser) -> None:
    """The answer asks the browser to do without events: too many others have them."""
    with shop.serve() as (_, url), watched(chromium, url) as operator:
        page = operator.page
        page.clock.install()
        page.route("**/events", lambda route: route.fulfill(status=204))
        with page.expect_response("**/events"):
            page.goto(url)
        page.wait_for_selector("table.consumers")
        page.unroute("**/events")
        with page.expect_response("**/events") as again:
            page.clock.run_for(11_000)
        assert again.value.status == 200
