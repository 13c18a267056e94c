"""Checks of the balance: they read all messages of a source, so one runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onceward import Onceward
from onceward.console import Access, Role, UsersFile, backstage, create
from onceward.console import users as hashed
from onceward.console.backstage import Backstage, CheckAnswer
from onceward.inspection.counts import balance_of
from tests.integration.console.test_access import PASSWORD, Browser
from tests.support.wait import until

pytestmark = pytest.mark.req("UI-32")


class Shop:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = Onceward("shop")
        for name in ("charge", "notify"):
            self.app.consumer(f"sqlite:///{directory}/{name}.db", name=name)(lambda order: None)
        self.users = UsersFile(directory / "users.txt")
        for role in Role:
            self.users.add(role.name.lower(), PASSWORD, role)
        self.struck = 0
        self.may_end = threading.Event()
        self.may_end.set()

        def slowly(account: Any) -> Any:
            self.struck += 1
            assert self.may_end.wait(60)
            return balance_of(account)

        monkeypatch.setattr(backstage, "balance_of", slowly)
        monkeypatch.setattr(backstage, "SOON", 0.2)
        monkeypatch.setattr(Backstage, "_check", lambda self: None)  # the one in the background
        self.stage = Backstage(self.app)

    def browser(self, user: str) -> Browser:
        site = create(self.app, backstage=self.stage, access=Access(users=self.users))
        made = Browser(site, "127.0.0.1", "127.0.0.1")
        made.log_in(user)
        return made


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(hashed, "COST", 16)
    made = Shop(tmp_path, monkeypatch)
    yield made
    made.may_end.set()
    made.stage.stop()


def test_a_viewer_gets_a_recent_verdict_with_its_age_and_an_operator_a_new_one(shop: Shop) -> None:
    viewer, operator = shop.browser("viewer"), shop.browser("operator")
    assert viewer.post("/consumers/charge/check").headers["location"] == "/consumers/charge"
    answer = viewer.post("/consumers/charge/check").headers["location"]
    assert answer == "/consumers/charge?note=check_fresh"
    page = viewer.get(answer).text
    assert "The last check is recent enough" in page
    assert "checked <time" in page
    assert shop.struck == 1
    assert viewer.post("/consumers/notify/check").headers["location"] == "/consumers/notify", "another one"
    assert operator.post("/consumers/charge/check").headers["location"] == "/consumers/charge"
    assert shop.struck == 3


def test_a_check_that_took_long_is_recent_for_longer(shop: Shop) -> None:
    assert shop.stage.check_soon("charge", again=False) is CheckAnswer.DONE
    until(lambda: "charge" in shop.stage.checked)
    last = shop.stage.checked["charge"]
    for age, seconds, answer in ((31.0, 0.1, CheckAnswer.DONE), (31.0, 2.0, CheckAnswer.FRESH)):
        shop.stage.checked["charge"] = last._replace(at=last.at - age, seconds=seconds)
        assert shop.stage.check_soon("charge", again=False) is answer


def test_one_runs_at_a_time_and_nobody_waits_for_it(shop: Shop) -> None:
    shop.may_end.clear()
    viewer, operator = shop.browser("viewer"), shop.browser("operator")
    assert viewer.post("/consumers/charge/check").headers["location"].endswith("check_long")
    assert "A check is running" in viewer.get("/consumers/charge").text
    assert "A check is running" not in viewer.get("/consumers/notify").text
    for browser in (viewer, operator):
        for name in ("charge", "notify"):
            answer = browser.post(f"/consumers/{name}/check").headers["location"]
            assert answer == f"/consumers/{name}?note=check_busy"
            assert "one at a time" in browser.get(answer).text
    assert shop.struck == 1
    shop.may_end.set()
    until(lambda: "charge" in shop.stage.checked)
    until(lambda: shop.stage.check_soon("notify", again=True) is CheckAnswer.DONE)
    assert "A check is running" not in viewer.get("/consumers/charge").text


def test_a_check_that_breaks_says_so_and_lets_the_next_one_run(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(account: Any) -> Any:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(backstage, "balance_of", breaks)
        assert shop.stage.check_soon("charge", again=True) is CheckAnswer.DONE
    assert shop.stage.checked["charge"].problem == "RuntimeError: no"
    assert shop.stage.checking is None
    assert shop.stage.check_soon("charge", again=True) is CheckAnswer.DONE
    assert shop.stage.checked["charge"].balance is not None
