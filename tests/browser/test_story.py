"""An operator's day in a real browser: messages fail, and every one of them gets home."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Shop
from tests.support.browser import watched
from tests.support.wait import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FIRST_GROUP = "table.groups tbody tr:first-child a"


@pytest.mark.req("UI-06", "UI-08", "UI-12")
def test_letters_are_grouped_tried_edited_and_redriven_and_the_balance_holds(
    shop: Shop, chromium: Browser
) -> None:
    orders = [{"id": f"order-{number}", "card_number": "4111"} for number in range(12)]
    shop.place(
        *orders, {"id": "order-100", "error": "customer 5 is unknown"}, {"id": "good", "currency": "EUR"}
    )
    with shop.serve() as (_, url), watched(chromium, url) as operator:
        page = operator.page
        until(lambda: shop.has_letters(13))
        page.goto(url)
        page.wait_for_selector("text=running")
        page.wait_for_selector(".tile.bad >> text=13")  # by itself: the page is live
        operator.clicks = 0
        operator.click("nav >> text=Dead letters")
        assert "order-<number> has no currency" in page.inner_text(FIRST_GROUP)
        operator.click(FIRST_GROUP)
        operator.click("button:has-text('Dry run')")
        assert "12 would die again" in page.inner_text(".dry")
        assert shop.letters() == 13
        shop.fix()
        operator.clicks -= 1  # it was tried before the fix, too
        operator.click("button:has-text('Dry run')")
        page.wait_for_selector(".dry.good")
        assert "12 would succeed" in page.inner_text(".dry")
        assert "+ bills" in page.inner_text(".dry .plus >> nth=0")
        assert shop.bills() == ["good"]
        shop.place({"id": "late", "error": "order-5 has no currency"})  # looks the same, and arrived later
        until(lambda: shop.letters() == 14)
        page.fill("[name=root_cause]", "the form lost its currency")
        page.fill("[name=fix_ref]", "release 2.4.1")
        page.fill("[name=rate]", "1000")
        operator.click("button:has-text('Redrive')")
        assert operator.clicks <= 5
        page.wait_for_selector("text=It is over.")
        assert sorted(shop.bills()) == sorted(["good", *(order["id"] for order in orders)])
        assert (shop.letters("resolved"), shop.letters("open")) == (12, 2)
        # The other one has a wrong payload: correct it.
        page.goto(f"{url}/letters?text=unknown")
        page.click(FIRST_GROUP)
        page.click("tbody th a")
        page.click("text=Edit")
        assert "customer 5 is unknown" in page.input_value("textarea")
        page.fill("[name=cause]", "the customer was merged")
        page.click("text=Try and save")
        page.wait_for_selector("text=the payload is the same")
        page.fill("textarea", '{"id": "order-100", "currency": "EUR"}')
        page.click("text=Try and save")
        page.wait_for_selector("text=The corrected payload is stored")
        page.fill("[name=root_cause]", "a merged customer")
        page.fill("[name=fix_ref]", "edited")
        page.click("button:has-text('Redrive')")
        page.wait_for_selector("text=It is over.")
        assert "order-100" in shop.bills()
        page.goto(f"{url}/consumers/charge")
        page.click("text=Check now")
        page.wait_for_selector("section:has-text('Balance') .verdict.holds")
        page.goto(f"{url}/audit")
        shown = page.inner_text("main")
        assert "The chain is intact" in shown
        assert "the customer was merged" in shown
        page.goto(f"{url}/search?id=order-100")
        life = page.inner_text(".life").lower()
        assert all(word in life for word in ("appended", "first failed", "dead", "resolved", "applied"))


@pytest.mark.req("UI-08")
def test_of_two_operators_at_the_same_letters_one_redrives_and_the_other_is_told(
    shop: Shop, chromium: Browser
) -> None:
    shop.place(*({"id": f"order-{number}"} for number in range(5)))
    with shop.serve() as (_, url), watched(chromium, url) as ann, watched(chromium, url) as ben:
        until(lambda: shop.has_letters(5))
        for operator in (ann, ben):
            operator.page.goto(f"{url}/letters")
            operator.page.click(FIRST_GROUP)
            operator.page.fill("[name=root_cause]", "no currency")
            operator.page.fill("[name=fix_ref]", "release 2")
            operator.page.fill("[name=rate]", "1000")
        shop.fix()
        ann.page.click("button:has-text('Redrive')")
        ann.page.wait_for_selector("text=It is over.")
        ben.page.click("button:has-text('Redrive')")
        ben.page.wait_for_selector("text=no open letter that can be redriven matches")
        ben.problems = [each for each in ben.problems if "409" not in each]  # the browser logs every refusal
        assert sorted(shop.bills()) == [f"order-{number}" for number in range(5)]


@pytest.mark.req("UI-09")
def test_a_redrive_and_its_page_survive_the_death_of_the_server(shop: Shop, chromium: Browser) -> None:
    shop.place(*({"id": f"order-{number}"} for number in range(40)))
    with shop.serve() as (first, url):
        until(lambda: shop.has_letters(40))
        shop.fix()
        with watched(chromium, url) as operator:
            page = operator.page
            page.goto(f"{url}/letters")
            page.click(FIRST_GROUP)
            page.fill("[name=root_cause]", "no currency")
            page.fill("[name=fix_ref]", "release 2")
            page.fill("[name=rate]", "600")
            page.click("button:has-text('Redrive')")
            page.wait_for_selector("progress")
            page.wait_for_load_state()
            until(lambda: 0 < shop.letters("resolved") < 40)
            first.signal(signal.SIGKILL)
            first.kill()
            with shop.serve(port=int(url.rpartition(":")[2])):
                page.wait_for_selector("text=It is over.", timeout=120_000)
                assert sorted(shop.bills()) == sorted(f"order-{number}" for number in range(40))
            operator.problems = [
                each for each in operator.problems if "ERR_" not in each and "htmx" not in each
            ]


@pytest.mark.req("UI-07")
def test_nothing_that_a_message_brings_runs_in_the_browser(shop: Shop, chromium: Browser) -> None:
    bad = "<img src=x onerror=alert(1)><script>window.pwned=1</script>'\"]}{{7*7}}"
    shop.place(
        {"id": f"id-{bad}", "error": f"boom {bad}", bad: {bad: bad}, "note": bad},
        type=f"type {bad}",
        aggregate_id=f"aggregate {bad}",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        x=bad,
    )
    with shop.serve() as (_, url), watched(chromium, url) as operator:
        page = operator.page
        until(lambda: shop.has_letters(1))

        def check() -> None:
            assert page.evaluate("window.pwned") is None
            assert page.locator("main img, main script").count() == 0
            assert "49" not in page.inner_text("h1")

        for path in (
            "/",
            "/letters",
            "/consumers/charge",
            "/letters/1",
            "/letters/1/edit",
            "/audit",
            "/outbox",
        ):
            page.goto(f"{url}{path}")
            check()
        page.goto(f"{url}/letters/1")
        assert "window.pwned" in page.inner_text(".payload")  # as text
        page.goto(f"{url}/letters")
        page.fill("[name=text]", bad[:20])
        page.click("text=Filter")
        check()
        page.click(FIRST_GROUP)
        check()
        operator.click("button:has-text('Dry run')")
        page.wait_for_selector(".dry")
        check()
        page.click("summary")
        page.fill("[name=reason]", bad)
        page.click("button:has-text('Hold')")
        page.wait_for_selector("text=now held")
        page.goto(f"{url}/letters/1")
        check()
        page.goto(f"{url}/audit")
        check()
        page.goto(f"{url}/consumers/charge")
        page.click("summary:has-text('Pause')")
        page.fill("[name=reason]", bad)
        page.click("button:has-text('Pause')")
        page.wait_for_selector("text=It is paused.")
        check()
        for path in ("/", "/limits", "/audit"):
            page.goto(f"{url}{path}")
            page.wait_for_selector("text=window.pwned")
            check()
        page.goto(f"{url}/search")
        page.fill("[name=id]", f"id-{bad}")
        page.click("text=Find >> nth=-1")
        page.wait_for_selector(".life")
        check()
        page.goto(f"{url}/?note={bad[:30]}")
        check()


@pytest.mark.req("UI-11")
@pytest.mark.parametrize("look", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_every_page_passes_axe_and_fits_a_phone(shop: Shop, chromium: Browser, look: str) -> None:
    shop.place({"id": "order-1"}, {"id": "order-2"})
    with shop.serve() as (_, url), watched(chromium, url, color_scheme=look) as operator:
        page = operator.page
        until(lambda: shop.has_letters(2))
        paths = (
            "/",
            "/consumers/charge",
            "/letters",
            "/letters/1",
            "/letters/1/edit",
            "/audit",
            "/outbox",
            "/search?id=order-1",
            "/limits",
            "/boundary",
            "/redrives",
        )
        for path in paths:
            page.goto(f"{url}{path}")
            operator.check_page()


@pytest.mark.req("UI-11")
def test_the_way_from_the_first_page_to_a_redrive_needs_no_mouse(shop: Shop, chromium: Browser) -> None:
    shop.place({"id": "order-1"})
    with shop.serve() as (_, url), watched(chromium, url) as operator:
        page = operator.page
        until(lambda: shop.has_letters(1))
        page.goto(f"{url}/letters")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.focus(FIRST_GROUP)
        page.keyboard.press("Enter")
        page.wait_for_selector("[name=root_cause]")
        page.wait_for_load_state()
        page.focus("button:has-text('Dry run')")
        page.keyboard.press("Enter")
        page.wait_for_selector(".dry")
