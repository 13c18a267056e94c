"""What holds consumers back, in the console: pauses, outages, limits and held keys; and what is unknown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onceward import Contract, Limit, Onceward
from onceward._sync import run_blocking
from onceward.app.build import limit_scope
from onceward.console import Access, Role, UsersFile, create
from onceward.console import users as hashed
from onceward.console.backstage import Backstage
from onceward.console.overview import row
from onceward.deadletters import Burial, Category, DeadLetters
from onceward.failures.board import subjects_of
from onceward.failures.records import FleetRecords
from onceward.inbox import Inbox
from onceward.limits.records import LimitRecords, Wish
from onceward.outbox.queries import OutboxQueries
from onceward.storage.database import BlockingStoragePorts
from tests.integration.console.test_access import PASSWORD, Browser

ODD = "<img src=x onerror=alert(1)>"


def contract(id: str) -> Contract:
    return Contract(consumer_id=id, event_types=["*"], owner_team="a", idempotency_mechanism="dedup row")


class Shop:
    def __init__(self, directory: Path) -> None:
        self.app = Onceward("shop", database=f"sqlite:///{directory}/shop.db", dependencies=["payments"])
        self.app.consumer(f"sqlite:///{directory}/orders.db", contract=contract("billing"), name="charge")(
            lambda order, session: None
        )
        self.app.consumer(
            f"sqlite:///{directory}/mails.db",
            name="notify",
            limit=Limit(rate="5/s", concurrency=1, by="email"),
            depends_on=["payments"],
        )(lambda mail: None)
        self.app.consumer(
            f"sqlite:///{directory}/parcels.db",
            name="ship",
            contract=contract("shipping"),
            order_by="customer",
        )(lambda parcel, session: None)
        self.engine = self.app.create_engine()
        self.letters = DeadLetters(self.engine)
        self.letters.migrate()
        self.users = UsersFile(directory / "users.txt")
        self.states: list[dict[str, Any]] = []
        self.stages: list[Backstage] = []

    @property
    def ports(self) -> BlockingStoragePorts:
        return BlockingStoragePorts(self.engine)

    def browser(self, *, redact: tuple[str, ...] = (), sees_workers: bool = True) -> Browser:
        stage = Backstage(self.app, redact=redact, state=(lambda: self.states[-1]) if sees_workers else None)
        self.stages.append(stage)
        return Browser(create(self.app, backstage=stage), "127.0.0.1", "127.0.0.1")

    def limit(self) -> LimitRecords:
        consumer = self.app.consumers["notify"]
        assert consumer.limit is not None
        return LimitRecords(self.ports, limit_scope(self.app, consumer), consumer.limit)

    def run_workers(self, **status: Any) -> None:
        self.states.append(
            {
                "stage": "running",
                "workers": [
                    {
                        "worker": 1,
                        "pid": 77,
                        "live": True,
                        "consumers": [consumer_status(name, **status) for name in self.app.consumers],
                        "were_stuck": [],
                    }
                ],
            }
        )


def consumer_status(name: str, **more: Any) -> dict[str, Any]:
    """As `/progress` of a run has it."""
    return {
        "consumer": name, "state": "consuming", "succeeded": 0, "failed": 0, "in_flight": 0, "stuck": 0,
        "oldest_in_flight_seconds": None, "problem": None, "held": None, "paused": False, "limited": None,
        "limited_seconds": None, "flights": [], **more,
    }  # fmt: skip


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(hashed, "COST", 16)  # hashing slowly is its purpose, but not the test's
    made = Shop(tmp_path)
    made.run_workers()
    yield made
    for stage in made.stages:
        stage.stop()
    made.engine.dispose()


def words(page: str) -> str:
    """What a reader sees."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.partition("<main")[2])).split())


# ── pauses ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("UI-19", "OU-12")
def test_a_consumer_is_paused_and_resumed_with_a_reason_that_every_page_and_the_audit_show(
    shop: Shop,
) -> None:
    browser = shop.browser(sees_workers=False)
    refused = browser.post("/consumers/charge/pause", reason=" ")
    assert (refused.status_code, "say why" in refused.text) == (400, True)
    answer = browser.post("/consumers/charge/pause", reason="the provider is maintained")
    assert answer.headers["location"] == "/consumers/charge?note=pause"
    twice = browser.post("/consumers/charge/pause", reason="the provider is maintained")
    assert twice.headers["location"].endswith("note=paused_already")
    assert "Paused by" in browser.get("/consumers/charge").text
    for path in ("/consumers/charge", "/limits"):
        assert "the provider is maintained" in browser.get(path).text, path
    again = browser.post("/consumers/charge/pause", reason="it takes longer")
    assert again.headers["location"].endswith("note=pause_again")
    assert "replace the earlier ones" in browser.get("/consumers/charge?note=pause_again").text
    for path in ("/consumers/charge", "/limits"):
        assert "it takes longer" in browser.get(path).text, path
        assert "the provider is maintained" not in browser.get(path).text, path
    assert row(shop.stages[0], "charge")["state"] == "paused"
    assert row(shop.stages[0], "notify")["state"] == "unknown", "only the one that was paused"
    assert browser.post("/consumers/charge/resume", reason="it is over").status_code == 303
    assert "Paused by" not in browser.get("/consumers/charge").text
    entries = [(each["action"], each["details"]) for each in shop.letters.audit()]
    assert [action for action, _ in entries] == ["resume", "pause", "pause"]
    assert "it is over" in entries[0][1]


@pytest.mark.req("UI-19")
def test_only_an_operator_pauses_and_only_with_a_form_of_this_console(shop: Shop) -> None:
    for role in Role:
        shop.users.add(role.name.lower(), PASSWORD, role)
    site = create(shop.app, access=Access(users=shop.users))
    for role in Role:
        browser = Browser(site, "10.0.0.7", "console.example")
        browser.log_in(role.name.lower())
        shows_form = "/consumers/charge/pause" in browser.get("/consumers/charge").text
        assert shows_form == (role >= Role.OPERATOR)
        for action in ("pause", "resume"):
            path = f"/consumers/charge/{action}"
            assert browser.send(path, reason="no token").status_code == 403
            assert browser.post(path, {"origin": "http://evil.example"}, reason="r").status_code == 403
            assert browser.post(path, reason="r").status_code == (303 if role >= Role.OPERATOR else 403)
    assert {each["operator"] for each in shop.letters.audit()} == {"operator", "admin"}
    assert len(shop.letters.audit()) == 4
    site.state.console.backstage.stop()


@pytest.mark.req("UI-19")
def test_without_a_database_nothing_can_be_paused_and_the_page_says_so(tmp_path: Path) -> None:
    app = Onceward("small")
    app.consumer(f"sqlite:///{tmp_path}/orders.db", name="charge")(lambda order: None)
    site = create(app)
    browser = Browser(site, "127.0.0.1", "127.0.0.1")
    assert "/consumers/charge/pause" not in browser.get("/consumers/charge").text
    assert "has no database" in browser.post("/consumers/charge/pause", reason="r").text
    assert "has no database" in browser.get("/limits").text
    site.state.console.backstage.stop()


@pytest.mark.req("UI-19")
@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"held": "paused by ann", "paused": True}, "paused"),
        ({"held": "waiting for payments"}, "outage"),
        ({"state": "waiting", "problem": "no source"}, "outage"),
        ({}, "running"),
    ],
)
def test_the_overview_says_what_holds_a_consumer(shop: Shop, status: dict[str, Any], state: str) -> None:
    shop.run_workers(**status)
    page = shop.browser().get("/").text
    assert f'class="state {state}"' in page
    assert (status.get("held") or status.get("problem") or "") in page


# ── letters on hold ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("UI-08", "CC-197")
def test_an_action_that_changes_nothing_says_why(shop: Shop) -> None:
    for id in ("a", "b"):
        shop.letters.bury(
            Burial(
                consumer="billing", message_id=id, origin="here", body=b"{}", category=Category.BUSINESS, reason="no"
            )
        )  # fmt: skip
    browser = shop.browser()

    def act(action: str, ids: str) -> str:
        return browser.post(f"/letters/{action}", ids=ids, reason="case 7").headers["location"]

    assert act("release", "1") == "/letters/1?note=not_held"
    assert act("hold", "1") == "/letters/1?note=hold:1"
    assert act("discard", "1") == "/letters/1?note=held:1"
    assert "Nothing was discarded: 1 letter is on hold." in words(browser.get("/letters/1?note=held:1").text)
    assert act("release", "1") == "/letters/1?note=release:1"
    assert act("discard", "1") == "/letters/1?note=discard:1"
    assert act("discard", "1") == "/letters/1?note=nothing"


# ── outages and limits ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("UI-20")
def test_an_outage_is_shown_with_its_reason_its_next_probe_and_who_waits(shop: Shop) -> None:
    records = FleetRecords(shop.ports)
    alone, _ = subjects_of("shop", shop.app.consumers.charge.identity, ["payments"])
    run_blocking(records.declare("consumer:ship", "as an earlier version wrote it", 600.0))
    run_blocking(records.declare("dependency:payments", f"refused {ODD}", 600.0))
    run_blocking(records.declare(alone, "timeout", 0.0))
    browser = shop.browser()
    page = browser.get("/limits").text
    assert ODD not in page
    shown = words(page)
    ago = r"(?:just now|\d+ s ago)"
    assert re.search(rf"payments a dependency {ago} refused {re.escape(ODD)} next probe in \d+ min", shown)
    assert re.search(rf"charge what it calls {ago} timeout a probe is due 0 charge", shown)
    assert re.search(rf"ship what it calls {ago} as an earlier version wrote it next probe in \d+ min", shown)
    assert re.search(r"0 notify", shown), "who waits"
    assert "It waits for payments" in words(browser.get("/consumers/notify").text)
    assert "It waits for" not in words(browser.get("/consumers/ship").text)


@pytest.mark.req("UI-20")
def test_a_limit_is_shown_with_its_use_its_keys_and_how_many_wait(shop: Shop) -> None:
    records = shop.limit()
    run_blocking(records.begin())
    states = run_blocking(records.take({"ann": Wish(3, 0), ODD: Wish(1, 0)}, 10, {}))
    shop.run_workers(limited=4, limited_seconds=65.0)
    browser = shop.browser()
    shown = words(browser.get("/limits").text)
    assert "notify 5/s and 1 at once, for each email 2 2 4 oldest 1 min 5 s 1 key" in shown
    token = states["ann"].grants[0].token
    assert token is not None
    run_blocking(records.free({token: 2.5}))
    page = browser.get("/consumers/notify").text
    assert ODD not in page
    assert "4, the oldest for 1 min 5 s" in words(page)
    assert "Slow keys" in page
    assert re.search(r"ann 2.5 s 0", words(page))
    hidden = shop.browser(redact=("email",)).get("/consumers/notify").text
    assert "Slow keys" in hidden
    assert ">ann<" not in hidden


@pytest.mark.req("UI-20")
def test_what_nobody_knows_is_unknown(shop: Shop) -> None:
    browser = shop.browser(sees_workers=False)
    assert re.search(
        r"in all processes together unknown unknown unknown unknown", words(browser.get("/limits").text)
    )
    assert "Unknown: this console does not see the workers." in words(browser.get("/consumers/notify").text)
    shop.app.override("test", database="postgresql://nobody@127.0.0.1:1/nothing")
    page = words(shop.browser().get("/limits").text)
    assert "Unknown: the database does not answer" in page
    assert "Nothing is down" not in page


@pytest.mark.req("UI-20")
def test_a_held_key_is_shown_with_its_letter(shop: Shop) -> None:
    shop.letters.bury(
        Burial(
            consumer="shipping", origin="here", message_id="m1", body=b"{}", category=Category.BUSINESS,
            reason="failed", error="no address", attempts=1, event_type="", order_key=f"customer {ODD}",
        )
    )  # fmt: skip
    browser = shop.browser()
    for path in ("/consumers/ship", "/letters/1"):
        page = browser.get(path).text
        assert ODD not in page
        assert f"customer {ODD}" in words(page), path
    assert 'href="/letters/1"' in browser.get("/consumers/ship").text
    hidden = shop.browser(redact=("customer",))
    for path in ("/consumers/ship", "/letters/1"):
        assert f"customer {ODD}" not in words(hidden.get(path).text), path


# ── work in flight ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("UI-18")
def test_work_in_flight_is_shown_with_its_age_step_key_and_stack(shop: Shop) -> None:
    flight = {"id": f"m {ODD}", "seconds": 65.0, "step": "process", "attempt": 2, "stuck": False}
    known = {**flight, "key": f"key {ODD}", "stack": f"in wait_for_the_bank {ODD}"}
    waiting = {**flight, "id": "m2", "step": None, "attempt": 0}  # as another run's /progress has it
    shop.run_workers(flights=[waiting, known])
    shop.states[-1]["workers"][0]["were_stuck"] = [
        {**known, "consumer": "notify", "pid": 76, "at": 1.0, "id": "earlier"},
        {**waiting, "consumer": "charge", "pid": 76, "at": 1.0, "id": "of another"},
    ]
    page = shop.browser().get("/consumers/notify").text
    assert ODD not in page
    shown = words(page)
    assert f"m {ODD} 1 min 5 s process, attempt 2" in shown
    assert f"key {ODD} 1 pid 77" in shown
    assert "m2 1 min 5 s fetched, not begun" in shown
    assert shown.count("in wait_for_the_bank") == 2
    assert "earlier at process" in shown
    assert "of another" not in shown
    assert f"key {ODD}" not in words(shop.browser(redact=("email",)).get("/consumers/notify").text)


# ── a database that is locked ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stuck(shop: Shop) -> Iterator[None]:
    """A handler is stuck inside its transaction."""
    Inbox(shop.engine).register(contract("billing"))
    shop.letters.bury(
        Burial(
            consumer="billing", message_id="a", origin="orders.db", body=b"{}", category=Category.BUSINESS, reason="no"
        )
    )  # fmt: skip
    with shop.engine.connect() as handler:
        handler.exec_driver_sql("BEGIN IMMEDIATE")
        yield
        handler.exec_driver_sql("ROLLBACK")


@pytest.mark.req("UI-29")
@pytest.mark.usefixtures("stuck")
def test_every_page_can_be_read_while_a_handler_is_stuck_in_its_transaction(shop: Shop) -> None:
    browser = shop.browser()
    [letter] = shop.letters.find()
    pages = [
        "/", "/consumers/charge", "/letters", f"/letters/{letter.id}", "/redrives", "/limits", "/outbox", "/audit",
        "/search?id=a",
    ]  # fmt: skip
    for path in pages:
        page = browser.get(path)
        assert (page.status_code, "locked" in page.text) == (200, False), (path, words(page.text))


@pytest.mark.req("UI-29")
@pytest.mark.usefixtures("stuck")
def test_an_inbox_and_an_outbox_can_be_looked_at_while_a_handler_is_stuck_in_its_transaction(
    shop: Shop,
) -> None:
    inbox = Inbox(shop.engine)
    assert [each["consumer_id"] for each in inbox.consumers()] == ["billing"]
    assert (inbox.holds(), inbox.effects(in_doubt=True)) == ([], [])
    assert OutboxQueries(shop.engine).counts() == {}
    assert shop.letters.audit() == []
