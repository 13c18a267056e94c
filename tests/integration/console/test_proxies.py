"""The console behind a proxy: whose request it is, and what a forged header may not change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from onceward import Onceward
from onceward.console import Access, Role, UsersFile, create
from onceward.console.site import serve
from tests.integration.console.test_access import PASSWORD, Browser

USER = {"x-user": "ann", "x-role": "admin"}


@pytest.fixture
def app(tmp_path: Path) -> Onceward:
    return Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")


def statuses(app: Onceward, access: Access, *requests: dict[str, str]) -> list[int]:
    """What the console's own server answers to these headers from this machine."""

    async def ask() -> list[int]:
        async with (
            serve(create(app, access=access), "127.0.0.1", 0, "--console") as url,
            httpx.AsyncClient(base_url=url) as client,
        ):
            return [(await client.get("/", headers=headers)).status_code for headers in requests]

    return asyncio.run(ask())


@pytest.mark.req("UI-10")
def test_a_proxy_on_this_machine_may_say_for_whom_it_asks(app: Onceward) -> None:
    access = Access(header="x-user", role_header="x-role", proxies=["127.0.0.1"])
    assert statuses(app, access, USER, {**USER, "x-forwarded-for": "203.0.113.9"}) == [200, 200]


@pytest.mark.req("UI-10")
def test_a_forged_address_is_not_that_of_a_proxy(app: Onceward) -> None:
    access = Access(header="x-user", role_header="x-role", proxies=["10.0.0.5"])
    assert statuses(app, access, USER, {**USER, "x-forwarded-for": "10.0.0.5"}) == [401, 401]


@pytest.mark.req("UI-10")
def test_without_users_what_a_proxy_on_this_machine_forwards_is_refused(app: Onceward) -> None:
    assert statuses(app, Access(), {}, {"x-forwarded-for": "203.0.113.9"}) == [200, 403]


@pytest.mark.req("UI-10", "UI-17")
def test_logins_through_a_proxy_on_this_machine_are_limited_by_the_address_it_names(
    app: Onceward, tmp_path: Path
) -> None:
    users = UsersFile(tmp_path / "users.txt")
    users.add("ann", PASSWORD, Role.VIEWER)
    browser = Browser(create(app, access=Access(users=users)), "127.0.0.1", "shop.example")
    stranger, ann = {"x-forwarded-for": "198.51.100.7"}, {"x-forwarded-for": "6.6.6.6, 203.0.113.9"}
    wrong = [browser.post("/login", stranger, name=f"n{each}", password="x" * 12) for each in range(6)]
    assert [each.status_code for each in wrong] == [401] * 5 + [429]
    entered = browser.post("/login", {**ann, "x-forwarded-proto": "https"}, name="ann", password=PASSWORD)
    assert entered.status_code == 303
    assert "Secure" in entered.headers["set-cookie"]


@pytest.mark.req("UI-17")
def test_a_session_with_an_endless_number_is_none(app: Onceward, tmp_path: Path) -> None:
    users = UsersFile(tmp_path / "users.txt")
    users.add("ann", PASSWORD, Role.VIEWER)
    browser = Browser(create(app, access=Access(users=users)), "127.0.0.1", "shop.example")
    cookie = f"onceward_session=ann|x|{'9' * 5000}|x"
    assert browser.get("/", headers={"cookie": cookie}).status_code == 303


@pytest.mark.req("UI-10", "UI-17")
def test_a_users_file_that_cannot_be_read_lets_nobody_in_and_is_not_shown(
    app: Onceward, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    users = UsersFile(tmp_path / "users.txt")
    users.add("ann", PASSWORD, Role.VIEWER)
    browser = Browser(create(app, access=Access(users=users)), "127.0.0.1", "shop.example")
    assert browser.log_in("ann").status_code == 303
    (tmp_path / "users.txt").write_text("nonsense\n")
    page = browser.get("/")
    assert (page.status_code, str(tmp_path) in page.text) == (503, False)
    assert "line 1 of" in caplog.text
    assert str(tmp_path) not in browser.log_in("ann").text
    (tmp_path / "users.txt").unlink()
    assert browser.get("/").status_code == 503
