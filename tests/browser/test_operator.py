"""A new operator with nothing but a browser: messages fail, kill their process or never end, and all get home."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from onceward.boundary import BoundaryClient
from onceward.connectors import SqliteConnector
from onceward.transaction import Transaction
from tests.browser.conftest import Shop
from tests.support.boundary.server import boundary_server
from tests.support.browser import watched
from tests.support.wait import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SHOP = """
import os
import signal
import time
from pathlib import Path
from onceward import Contract, ExceptionCategory, Limit, Onceward, TransactionException, outage

app = Onceward("shop", database="sqlite:///shop.db", dependencies={"tax": outage(after=1)})
LOOP = {"empty_queue": {"backoff": 0.02, "backoff_cap": 0.1}}
ONCE = {"loop": LOOP, "steps": {"process": {"retry": {"timeout": 0.5}}}}


def contract(id, **more):
    return Contract(
        consumer_id=id, event_types=["*"], owner_team="money", idempotency_mechanism="row", lease=5, **more
    )


@app.consumer("sqlite:///orders.db?lease=5", contract=contract("billing", poison_after=2), policy={"loop": LOOP})
def charge(order: dict, session) -> None:
    if not Path("fixed").exists():
        if order.get("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "currency" not in order:
            raise TransactionException(f"{order['id']} has no currency", category=ExceptionCategory.BUSINESS)
    session.execute("INSERT INTO bills (id) VALUES (:id)", {"id": order["id"]})


@app.consumer("sqlite:///mails.db?lease=5", limit=Limit(rate="100/s", by="customer"), policy=ONCE)
def notify(mail: dict) -> None:
    if not Path("fixed").exists():
        wait_for_the_mail_server()
    Path(mail["id"]).touch()


def wait_for_the_mail_server() -> None:
    while True:
        time.sleep(0.02)


@app.consumer("sqlite:///parcels.db", contract=contract("shipping"), order_by="customer", policy={"loop": LOOP})
def ship(parcel: dict, session) -> None:
    if not Path("fixed").exists():
        raise TransactionException("no address", category=ExceptionCategory.BUSINESS)
    session.execute("INSERT INTO bills (id) VALUES (:id)", {"id": parcel["id"]})


@app.consumer("sqlite:///invoices.db", contract=contract("taxes"), depends_on=["tax"], policy={"loop": LOOP})
def tax(invoice: dict, session) -> None:
    if not Path("fixed").exists():
        raise ConnectionError("tax.example refused the connection")
    session.execute("INSERT INTO bills (id) VALUES (:id)", {"id": invoice["id"]})
"""


@pytest.fixture
def troubled(shop: Shop) -> Shop:
    (shop.directory / "shop.py").write_text(SHOP)
    return shop


def put(directory: Path, queue: str, *payloads: dict[str, object]) -> None:
    with SqliteConnector(directory / queue) as source:
        source.dispatch_transactions([Transaction(id=str(each["id"]), payload=each) for each in payloads])


def redrive(page: Page, url: str, group: str) -> None:
    page.goto(f"{url}/letters")
    page.click(f"table.groups a:has-text('{group}')")
    page.fill("[name=root_cause]", "it was broken")
    page.fill("[name=fix_ref]", "release 2")
    page.fill("[name=rate]", "1000")
    if page.locator("[name=poison_fixed]").count():
        page.check("[name=poison_fixed]")
    page.click("button.primary:has-text('Redrive')")
    page.wait_for_selector("text=It is over.")


@pytest.mark.req("UI-18", "UI-19", "UI-20", "UI-22")
def test_failing_poisoned_and_stuck_messages_get_home_through_the_browser_alone(
    troubled: Shop, chromium: Browser
) -> None:
    orders = [{"id": f"order-x{number}"} for number in range(3)]
    put(troubled.directory, "orders.db", *orders, {"id": "killer", "kills": True, "currency": "EUR"})
    put(troubled.directory, "mails.db", {"id": "mail-1", "customer": "ann"})
    put(
        troubled.directory,
        "parcels.db",
        *({"id": f"parcel-{number}", "customer": "ann"} for number in (1, 2)),
    )
    put(troubled.directory, "invoices.db", {"id": "invoice-1"})
    with (
        troubled.serve(ONCEWARD_ENGINE__STUCK_GRACE="0.5") as (_, url),
        watched(chromium, url) as operator,
    ):
        page = operator.page
        until(
            lambda: troubled.has_letters(5)
        )  # three orders, their killer, and a parcel that holds the other
        # What is stuck: where its code is, and no more of it for now.
        page.goto(f"{url}/consumers/notify")
        until(lambda: page.reload() and page.locator("h2:has-text('Stuck attempts')").count())
        assert "in wait_for_the_mail_server" in page.inner_text("section:has(h2:text('Stuck attempts'))")
        page.click("summary:has-text('Pause')")
        page.fill("[name=reason]", "the mail server hangs")
        page.click("button:has-text('Pause')")
        page.wait_for_selector("text=the mail server hangs")
        operator.check_page()
        page.goto(url)
        page.wait_for_selector("tr:has(a:text('notify')) .state.paused")
        page.wait_for_selector("tr:has(a:text('tax')) .state.outage")
        # What holds the others.
        page.click("nav >> text=Limits and outages")
        shown = page.inner_text("main")
        operator.check_page()
        assert all(each in shown for each in ("tax.example refused the connection", "the mail server hangs"))
        page.click("td a:text-is('tax')")
        page.wait_for_selector("text=It waits for tax")
        page.goto(f"{url}/consumers/ship")
        until(lambda: page.reload() and "ann letter" in page.inner_text("main").replace("\t", " "))
        operator.check_page()
        # Fixed: everything goes home.
        troubled.fix()
        for group in ("<id> has no currency", "without ever ending", "no address"):
            redrive(page, url, group)
        page.goto(f"{url}/consumers/notify")
        page.fill("[name=reason]", "it answers again")
        page.click("button:has-text('Resume')")
        page.wait_for_selector("text=It is resumed.")
        until((troubled.directory / "mail-1").exists)
        home = ["invoice-1", "killer", "order-x0", "order-x1", "order-x2", "parcel-1", "parcel-2"]
        until(lambda: sorted(troubled.bills()) == home)
        for consumer in ("charge", "notify", "ship", "tax"):
            page.goto(f"{url}/consumers/{consumer}")
            page.click("text=Check now")
            page.wait_for_selector("section:has-text('Balance') .verdict.holds")
        page.goto(f"{url}/letters")
        assert "There is nothing to do." in page.inner_text("main")
        page.goto(f"{url}/audit")
        assert "it answers again" in page.inner_text("main")


@pytest.mark.req("UI-07", "UI-11", "UI-21")
def test_the_page_of_a_boundary_is_readable_for_all_and_runs_nothing(shop: Shop, chromium: Browser) -> None:
    bad = "<img src=x onerror=alert(1)>"
    with boundary_server(shop.directory / "hq") as boundary:
        (shop.directory / "shop.py").write_text(
            f"from onceward import Onceward\n\napp = Onceward('shop')\n\n\n"
            f"@app.consumer('boundary+{boundary}?consumer=audit')\ndef audit(fact: dict) -> None: ...\n"
        )
        with BoundaryClient(boundary) as client:
            client.put("files", f"a {bad}.pdf", b"x" * 5000, "application/pdf")
            client.fetch("audit", 1)
        for look in ("light", "dark"):
            with shop.console() as url, watched(chromium, url, color_scheme=look) as operator:
                page = operator.page
                page.goto(f"{url}/boundary")
                shown = page.inner_text("main")
                assert all(each in shown for each in ("audit", f"a {bad}.pdf", "Retention"))
                assert page.locator("main img").count() == 0
                operator.check_page()
