"""An outside call of which nobody knows whether it happened: operators record the provider's answer in the console."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward import Contract, Onceward, Refuse
from onceward.app.build import open_task
from onceward.connectors import SqliteConnector
from onceward.console import Access, Role, UsersFile, create
from onceward.console import users as hashed
from onceward.deadletters import Category, DeadLetter, DeadLetters, Filter
from onceward.transaction import Transaction
from tests.integration.console.test_access import PASSWORD, Browser

pytestmark = pytest.mark.req("UI-33")


class Desk:
    """Its provider answers the first call with an error, and forgets keys at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[str] = []
        self.results: list[Any] = []
        self.is_down = True
        self.app = Onceward("desk", database=f"sqlite:///{directory}/desk.db")
        promised = Contract(
            consumer_id="paying",
            event_types=["*"],
            owner_team="a",
            idempotency_mechanism="key",
            mode="effectful",
        )

        @self.app.consumer(
            f"sqlite:///{directory}/orders.db?on_failure=dead_letter&max_deliveries=2&redelivery_delay=0.01",
            contract=promised,
        )
        def pay(order: dict[str, Any], session: Any) -> None:
            if not order["effect"]:
                raise Refuse("it has no effect")
            found = session.effect(order["effect"], self.call, key_valid_for=timedelta(microseconds=1))
            self.results.append(found)

        self.letters = DeadLetters(self.app.create_engine())
        self.letters.migrate()
        users = UsersFile(directory / "users.txt")
        for role in Role:
            users.add(role.name.lower(), PASSWORD, role)
        self.access = Access(users=users)

    def call(self, key: str) -> dict[str, str]:
        self.calls.append(key)
        if self.is_down:
            raise ValueError("no answer")
        return {"charge": "called"}

    def place(self, id: str, effect: str = "charge-card") -> None:
        with SqliteConnector(self.directory / "orders.db") as queue:
            queue.dispatch_transactions([Transaction(id=id, payload={"effect": effect})])

    def work(self) -> None:
        with open_task(self.app, self.app.consumers.pay) as task:
            task.consume_transactions()

    def letter(self, id: str = "order-1") -> DeadLetter:
        while not (found := [each for each in self.letters.find(Filter()) if each.message_id == id]):
            self.work()
        return found[0]

    def browser(self, user: str = "operator") -> Browser:
        made = Browser(create(self.app, access=self.access), "127.0.0.1", "127.0.0.1")
        made.log_in(user)
        return made

    def redrive(self, browser: Browser, letter: int) -> None:
        fields = {
            "consumer": "paying", "ids": str(letter), "status": "open", "root_cause": "x", "fix_ref": "y",
            "cause_category": "in_doubt",
        }  # fmt: skip
        assert browser.post("/letters/redrive", **fields).status_code == 303
        self.work()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(hashed, "COST", 16)
    return Desk(tmp_path)


def words(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.partition("<main")[2])).split())


def test_the_letter_names_the_effect_in_doubt_and_the_key_to_ask_the_provider_with(desk: Desk) -> None:
    desk.place("order-1")
    letter = desk.letter()
    assert letter.category is Category.IN_DOUBT
    page = words(desk.browser().get(f"/letters/{letter.id}").text)
    assert "charge-card" in page
    assert desk.calls[0] in page
    assert "It happened" in page
    assert "It did not happen" in page
    group = words(desk.browser().get("/letters/group?consumer=paying&category=in_doubt").text)
    assert "record what the provider says" in group


@pytest.mark.parametrize("happened", [True, False])
def test_with_the_answer_a_redrive_gets_it_home_and_never_calls_twice(desk: Desk, happened: bool) -> None:
    desk.place("order-1")
    letter, desk.is_down = desk.letter(), False
    browser = desk.browser()
    given = {"effect": "charge-card", "happened": "yes" if happened else "no", "reason": "in its log"}
    if happened:
        given["result"] = '{"charge": "ch_1"}'
    answer = browser.post(f"/letters/{letter.id}/effect", **given)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/letters/{letter.id}?note=effect")
    assert "It happened" not in words(browser.get(f"/letters/{letter.id}").text), "nothing is in doubt now"
    desk.redrive(browser, letter.id)
    assert desk.letter().status == "resolved"
    assert desk.results == [{"charge": "ch_1" if happened else "called"}]
    assert len(set(desk.calls)) == len(desk.calls) == (1 if happened else 2), "a new call has a new key"
    [noted] = [each for each in desk.letters.audit() if each["action"] == "resolve_effect"]
    assert noted["operator"] == "operator"
    assert "in its log" in noted["details"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reason": " "}, "give a reason"),
        ({"result": "{nonsense"}, "not JSON"),
        ({"happened": "no", "result": "1"}, "only an effect that happened has a result"),
        ({"happened": ""}, "what does the provider say"),
        ({"effect": "<b>other</b>"}, "is not in doubt"),
    ],
)
def test_what_is_no_answer_changes_nothing(desk: Desk, change: dict[str, str], said: str) -> None:
    desk.place("order-1")
    letter, browser = desk.letter(), desk.browser()
    given = {"effect": "charge-card", "happened": "yes", "reason": "r", "result": "", **change}
    refused = browser.post(f"/letters/{letter.id}/effect", **given)
    assert refused.status_code in (400, 409)
    assert said in words(refused.text)
    assert "<b>other" not in refused.text
    assert "It happened" in words(browser.get(f"/letters/{letter.id}").text)


def test_a_second_operator_hears_that_the_first_has_answered(desk: Desk) -> None:
    desk.place("order-1")
    letter = desk.letter()
    given = {"effect": "charge-card", "happened": "yes", "reason": "r"}
    assert desk.browser().post(f"/letters/{letter.id}/effect", **given).status_code == 303
    second = desk.browser().post(f"/letters/{letter.id}/effect", **{**given, "happened": "no"})
    assert second.status_code == 400
    assert "is not in doubt: it is done" in words(second.text)


def test_a_viewer_sees_it_and_answers_nothing(desk: Desk) -> None:
    desk.place("order-1", effect="<i>card</i>")
    letter, browser = desk.letter(), desk.browser("viewer")
    page = browser.get(f"/letters/{letter.id}").text
    assert "<i>card" not in page
    assert "<i>card</i>" in html.unescape(page)
    assert "It happened" not in words(page)
    refused = browser.post(f"/letters/{letter.id}/effect", effect="<i>card</i>", happened="yes", reason="r")
    assert refused.status_code == 403


def test_a_letter_without_effects_says_nothing_about_them(desk: Desk) -> None:
    desk.place("order-1", effect="")
    assert "Outside calls" not in words(desk.browser().get(f"/letters/{desk.letter().id}").text)
