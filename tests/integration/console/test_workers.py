"""Ending the process of a stuck attempt in the console: what the page says, who may, and which process is meant."""

from __future__ import annotations

import asyncio
import html
import json
import re
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from onceward import Contract, Onceward
from onceward.app.app import RELAY
from onceward.console import Access, Role, UsersFile, create, workers
from onceward.console import users as hashed
from onceward.console.backstage import Backstage
from onceward.deadletters import DeadLetters
from onceward.run.supervisor import EndAnswer, ProcessEnd
from tests.integration.console.test_access import PASSWORD, Browser
from tests.integration.console.test_holds import consumer_status

pytestmark = pytest.mark.req("UI-30")

PAGE = "/workers/1/end?process=5f0c&consumer=charge&id=order-1"
FORM = {"process": "5f0c", "consumer": "charge", "id": "order-1", "reason": "the bank hangs"}


def flight(id: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id, "seconds": 725.0, "step": "process", "attempt": 1, "attempt_seconds": 720.0, "stuck": False,
        "key": None, "stack": "in wait_for_the_bank", **more,
    }  # fmt: skip


class Shop:
    def __init__(self, directory: Path) -> None:
        self.file = directory / "shop.db"
        self.app = Onceward("shop", database=f"sqlite:///{self.file}")
        promised = Contract(
            consumer_id="billing",
            event_types=["*"],
            owner_team="a",
            idempotency_mechanism="row",
            poison_after=4,
        )
        self.app.consumer(f"sqlite:///{directory}/orders.db", contract=promised, name="charge")(
            lambda order, session: None
        )
        self.app.consumer(f"sqlite:///{directory}/mails.db?max_deliveries=2", name="notify")(
            lambda mail: None
        )
        self.letters = DeadLetters(self.app.create_engine())
        self.letters.migrate()
        self.users = UsersFile(directory / "users.txt")
        for role in Role:
            self.users.add(role.name.lower(), PASSWORD, role)
        self.answer = EndAnswer.BEGUN
        self.ended: list[tuple[int, str, ProcessEnd]] = []
        self.before_note: Callable[[], None] = lambda: None
        self.stages: list[Backstage] = []
        self.worker: dict[str, Any] = {
            "worker": 1,
            "pid": 4711,
            "process": "5f0c",
            "ending": None,
            "live": True,
            "were_stuck": [],
            "consumers": [
                consumer_status(
                    "charge", in_flight=3, flights=[flight("order-1"), flight("order-2", attempt=0)]
                ),
                consumer_status(
                    "notify", in_flight=1, flights=[flight("mail-1", seconds=20.0, attempt_seconds=2.0)]
                ),
                consumer_status(RELAY),
            ],
        }

    def end_worker(
        self, number: int, process: str, end: ProcessEnd, note: Callable[[], Coroutine[None, None, None]]
    ) -> EndAnswer:
        self.ended.append((number, process, end))
        if self.answer is EndAnswer.BEGUN:
            self.before_note()
            self.noting = asyncio.ensure_future(note())
        return self.answer

    def browser(self, user: str | None = None, *, beside: bool = True) -> Browser:
        stage = Backstage(
            self.app,
            state=lambda: {"stage": "running", "host": "shop-7", "workers": [self.worker]},
            end_worker=self.end_worker if beside else None,
        )
        self.stages.append(stage)
        access = Access() if user is None else Access(users=self.users)
        made = Browser(create(self.app, backstage=stage, access=access), "127.0.0.1", "127.0.0.1")
        if user is not None:
            made.log_in(user)
        return made

    def audit(self) -> list[tuple[str, str, dict[str, Any]]]:
        return [
            (each["operator"], each["action"], json.loads(each["details"])) for each in self.letters.audit()
        ]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(hashed, "COST", 16)
    made = Shop(tmp_path)
    yield made
    for stage in made.stages:
        stage.stop()


def words(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.partition("<main")[2])).split())


def test_the_page_says_what_would_happen_to_whom(shop: Shop) -> None:
    browser = shop.browser("operator")
    page = words(browser.get(PAGE).text)
    for said in (
        "End the process of worker 1? pid 4711 on shop-7",
        "order-1 of charge is at process, attempt 1, for 12 min , and was fetched 12 min 5 s ago",
        "in wait_for_the_bank",
        "have 5 s to finish",
        "delivered again",
        "Each message that was cut off counts one more start.",
        "counts as poison: it becomes a dead letter, and is not started again. "
        "That is after 4 starts of charge, 2 starts of notify.",
        "mail-1 notify 20 s process, attempt 1, for 2 s",
        "In flight in total: 3 of charge, 1 of notify.",
        "Pause charge, too",
    ):
        assert said in page, said
    assert shop.ended == [], "looking at it does nothing"


@pytest.mark.req("UI-18")
def test_the_link_is_beside_what_takes_long_for_those_who_may(shop: Shop) -> None:
    for user, may in (("viewer", False), ("operator", True), ("admin", True)):
        browser = shop.browser(user)
        for name, long in (("charge", True), ("notify", False)):
            page = html.unescape(browser.get(f"/consumers/{name}").text)
            assert ("End its worker process" in page) is (may and long), (user, name)
            assert (f"/workers/1/end?process=5f0c&consumer={name}" in page) is may, (user, name)


def test_a_viewer_neither_sees_nor_sends_the_form(shop: Shop) -> None:
    browser = shop.browser("viewer")
    assert browser.get(PAGE).status_code == 403
    assert browser.post("/workers/1/end", **FORM).status_code == 403
    assert (shop.ended, shop.audit()) == ([], [])


def test_an_operator_ends_it_with_a_reason_that_the_audit_keeps(shop: Shop) -> None:
    browser = shop.browser("operator")
    refused = browser.post("/workers/1/end", **{**FORM, "reason": " "})
    assert (refused.status_code, shop.ended) == (400, [])
    answer = browser.post("/workers/1/end", **FORM)
    assert answer.headers["location"] == "/consumers/charge?note=end"
    [(number, process, end)] = shop.ended
    assert (number, process, end.operator, end.reason) == (1, "5f0c", "operator", "the bank hangs")
    details = {
        "worker": 1, "pid": 4711, "host": "shop-7", "consumer": "charge", "message": "order-1", "in_flight": 4,
        "reason": "the bank hangs",
    }  # fmt: skip
    assert shop.audit() == [("operator", "end_worker", details)]
    shop.worker["ending"] = end._asdict()
    page = words(browser.get("/consumers/charge").text)
    assert "operator ends the process of worker 1 , pid 4711, since just now : the bank hangs" in page
    assert "operator is already ending it" in words(browser.get(PAGE).text)


def test_it_pauses_the_consumer_too_if_that_is_wanted(shop: Shop) -> None:
    browser = shop.browser("operator")
    browser.post("/workers/1/end", **FORM, pause="1")
    assert [action for _, action, _ in shop.audit()] == ["pause", "end_worker"]
    assert "Paused by operator" in browser.get("/consumers/charge").text


@pytest.mark.req("UI-29")
def test_the_audit_is_written_as_soon_as_the_stuck_handler_lets_go_of_the_database(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SHOWN_WITHIN", 0.2)
    browser = shop.browser("operator")
    browser.get("/login")
    stuck = sqlite3.connect(shop.file, isolation_level=None)

    async def story() -> int:
        stuck.execute("BEGIN IMMEDIATE")
        form = {**FORM, "csrf": browser.http.cookies["onceward_csrf"]}
        answer = await browser.http.post("/workers/1/end", data=form)
        assert shop.audit() == [], "the process is asked to end without waiting for the database"
        stuck.rollback()
        await asyncio.wait_for(shop.noting, 30)
        return answer.status_code

    assert asyncio.run(story()) == 303
    assert [action for _, action, _ in shop.audit()] == ["end_worker"]
    stuck.close()


@pytest.mark.parametrize(
    ("change", "answer", "note"),
    [
        pytest.param({"process": "another"}, EndAnswer.BEGUN, "end_gone", id="replaced"),
        pytest.param({"pid": None, "process": None}, EndAnswer.BEGUN, "end_gone", id="between-two"),
        pytest.param({}, EndAnswer.GONE, "end_gone", id="replaced-just-now"),
        pytest.param({}, EndAnswer.UNDER_WAY, "end_under_way", id="another-operator"),
        pytest.param({}, EndAnswer.STOPPING, "end_stopping", id="the-run-stops"),
    ],
)
def test_another_process_is_never_meant(
    shop: Shop, change: dict[str, Any], answer: EndAnswer, note: str
) -> None:
    shop.worker |= change
    shop.answer = answer
    browser = shop.browser("operator")
    done = browser.post("/workers/1/end", **FORM)
    assert done.headers["location"] == f"/consumers/charge?note={note}"
    assert len(shop.ended) == (not change)
    assert shop.audit() == [], "nothing was done"
    if note != "end_gone":
        assert "Nothing was done" in browser.get(done.headers["location"]).text or note == "end_under_way"
    if change:
        assert browser.get(PAGE).headers["location"].endswith("end_gone")


def test_a_console_out_of_reach_says_so_and_names_the_command(shop: Shop) -> None:
    del shop.worker["ending"]  # as /progress of a run has it
    for consumer in shop.worker["consumers"]:
        for each in consumer["flights"]:
            del each["key"], each["stack"]
    browser = shop.browser("operator", beside=False)
    page = words(browser.get(PAGE).text)
    assert "This console does not run with the workers" in page
    assert 'onceward end-worker 4711.5f0c --reason "why"' in page
    assert '<form method="post" class="card"' not in browser.get(PAGE).text
    assert browser.post("/workers/1/end", **FORM).status_code == 409
    assert shop.audit() == []
    for path in ("/consumers/charge", "/search?id=order-1", "/"):
        assert browser.get(path).status_code == 200, path


@pytest.mark.req("UI-07")
def test_what_messages_and_addresses_bring_is_escaped(shop: Shop) -> None:
    odd = "<img src=x onerror=alert(1)>"
    shop.worker["consumers"][0]["flights"] = [flight(odd, stack=odd)]
    browser = shop.browser("operator")
    for query in ({"consumer": "charge", "id": odd}, {"consumer": odd, "id": odd}):
        page = browser.get("/workers/1/end", params={"process": "5f0c", **query}).text
        assert "<img" not in page
        assert "&lt;img" in page
    assert browser.get("/workers/1/end?process=").status_code == 404


@pytest.mark.req("UI-06", "UI-18")
def test_a_search_finds_what_is_in_flight_and_leads_to_its_process(shop: Shop) -> None:
    for user, may in (("viewer", False), ("operator", True)):
        page = html.unescape(shop.browser(user).get("/search?id=order-1").text)
        assert "In worker 1 pid 4711 , charge : process, attempt 1, for 12 min" in words(page)
        assert "in wait_for_the_bank" in page
        assert ("/workers/1/end?process=5f0c&consumer=charge&id=order-1" in page) is may
    assert "In flight" not in words(shop.browser("operator").get("/search?id=order-9").text)
