"""Who may see and do what in the console, and what it refuses."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from starlette.applications import Starlette

from onceward import Contract, Inbox, Onceward
from onceward.connectors.codec import encode
from onceward.console import Access, Role, User, UsersFile, create
from onceward.console import users as hashed
from onceward.console.guard import FAILURES
from onceward.console.redaction import HIDDEN
from onceward.console.site import check_address
from onceward.deadletters import Burial, Category, DeadLetters, Filter
from onceward.errors import ConfigurationError
from onceward.transaction import Transaction
from tests.support import commands
from tests.support.wait import until

PASSWORD = "correct horse battery"


class Shop:
    def __init__(self, directory: Path) -> None:
        self.app = Onceward("shop", database=f"sqlite:///{directory}/shop.db")
        self.contract = Contract(
            consumer_id="billing", event_types=["*"], owner_team="a", idempotency_mechanism="dedup row"
        )

        @self.app.consumer(f"sqlite:///{directory}/orders.db", contract=self.contract)
        def charge(order: dict[str, Any], session: Any) -> None:
            assert HIDDEN not in json.dumps(order, ensure_ascii=False), "not even when it is tried"

        self.engine = self.app.create_engine()
        self.letters = DeadLetters(self.engine)
        self.letters.migrate()
        Inbox(self.engine).register(self.contract)
        self.users = UsersFile(directory / "users.txt")

    def bury(
        self, *ids: str, error: str = "boom", category: Category = Category.BUSINESS, **payload: Any
    ) -> None:
        transactions = [Transaction(id=each, payload={"id": each, **payload}) for each in ids]
        self.letters.bury(
            *(
                Burial(
                    consumer="billing",
                    origin="here",
                    message_id=each.id,
                    body=encode(each),
                    category=category,
                    reason="failed",
                    error=error,
                    attempts=1,
                    event_type="placed",
                )
                for each in transactions
            )
        )

    def client(
        self, site: Starlette | None = None, address: str = "127.0.0.1", host: str = "127.0.0.1"
    ) -> Browser:
        return Browser(site or create(self.app), address, host)


class Browser:
    """Keeps cookies, and sends the token of its forms."""

    def __init__(self, site: Starlette, address: str, host: str) -> None:
        transport = httpx.ASGITransport(site, client=(address, 5000), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(
            transport=transport, base_url=f"http://{host}", headers={"accept": "text/html"}
        )

    def get(self, path: str, **more: Any) -> httpx.Response:
        return asyncio.run(self.http.get(path, **more))

    def send(self, path: str, headers: dict[str, str] | None = None, **fields: str) -> httpx.Response:
        """A form as it is."""
        return asyncio.run(self.http.post(path, data=fields, headers=headers or {}))

    def post(self, path: str, headers: dict[str, str] | None = None, **fields: str) -> httpx.Response:
        """A form of a page."""
        self.get("/login")
        return self.send(path, headers, **{**fields, "csrf": self.http.cookies.get("onceward_csrf") or ""})

    def log_in(self, name: str, password: str = PASSWORD) -> httpx.Response:
        return self.post("/login", name=name, password=password)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(hashed, "COST", 16)  # hashing slowly is its purpose, but not the test's
    made = Shop(tmp_path)
    yield made
    made.engine.dispose()


def with_users(shop: Shop) -> Browser:
    for role in Role:
        shop.users.add(role.name.lower(), PASSWORD, role)
    return shop.client(create(shop.app, access=Access(users=shop.users)), "10.0.0.7", "console.example")


# ── this machine alone ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("UI-10")
def test_without_users_only_this_machine_gets_an_answer_and_only_under_its_own_names(shop: Shop) -> None:
    site = create(shop.app)
    for host in ("127.0.0.1", "localhost", "127.0.0.1:8090", "[::1]:8090", "LOCALHOST"):
        assert shop.client(site, host=host).get("/").status_code == 200, host
    for host in ("rebound.example", "127.0.0.1.evil.example", "localhost.evil.example:8090"):
        refused = shop.client(site, host=host).get("/")
        assert refused.status_code == 403, host
        assert "this machine alone" in refused.text
    assert shop.client(site, address="10.0.0.7").get("/").status_code == 403
    assert shop.client(site, address="10.0.0.7").get("/metrics").status_code == 403


@pytest.mark.req("UI-10")
def test_another_address_needs_users(shop: Shop, tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_address(host, Access())
    for host in ("0.0.0.0", "10.0.0.7", "::", "console.example"):
        with pytest.raises(ConfigurationError, match="open to everyone who can reach"):
            check_address(host, Access())
        check_address(host, Access(users=shop.users))
    (tmp_path / "shop.py").write_text(
        "from onceward import Onceward\napp = Onceward('shop')\n\n\n@app.consumer('sqlite:///orders.db')\n"
        "def charge(order: dict) -> None: ...\n"
    )
    for command in (("console", "shop:app", "--listen"), ("run", "shop:app", "--console")):
        refused = commands.onceward(*command, "0.0.0.0:0", cwd=tmp_path, env=dict(os.environ))
        assert (refused.returncode, "open to everyone" in refused.stderr) == (2, True), refused
    production = Onceward("shop", database="sqlite:///shop.db", env="production")
    with pytest.raises(ConfigurationError, match="in production needs users"):
        create(production)
    create(production, access=Access(authenticate=lambda _: None))


@pytest.mark.req("UI-15")
@pytest.mark.parametrize("url", ["sqlite:///", "127.0.0.1:8080", "http://", "http://[::1", "http://h:x"])
def test_the_address_of_a_run_is_a_url_of_the_web(tmp_path: Path, url: str) -> None:
    refused = commands.onceward("console", "shop:app", "--run", url, cwd=tmp_path, env=dict(os.environ))
    assert (refused.returncode, "--run must be the URL of a run" in refused.stderr) == (2, True), refused


# ── users ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("UI-10")
def test_a_user_logs_in_and_a_changed_password_ends_the_session(shop: Shop) -> None:
    browser = with_users(shop)
    assert browser.get("/").headers["location"] == "/login"
    assert browser.get("/metrics", headers={"accept": "*/*"}).status_code == 401
    assert browser.get("/livez").status_code == 200
    assert browser.log_in("operator", "wrong wrong wrong").status_code == 401
    assert browser.log_in("nobody").status_code == 401
    entered = browser.log_in("operator")
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "operator" in browser.get("/").text
    forged = browser.http.cookies["onceward_session"].replace("operator", "admin")
    other = with_users(shop)
    other.http.cookies["onceward_session"] = forged
    assert other.get("/").status_code == 303
    browser = shop.client(create(shop.app, access=Access(users=shop.users)), "10.0.0.7", "console.example")
    browser.log_in("operator")
    assert browser.get("/").status_code == 200
    shop.users.add("operator", "another password", Role.OPERATOR)
    assert browser.get("/").status_code == 303


@pytest.mark.req("UI-10")
def test_after_some_wrong_passwords_even_the_right_one_has_to_wait(shop: Shop) -> None:
    browser = with_users(shop)
    for _ in range(FAILURES):
        assert browser.log_in("admin", "wrong wrong wrong").status_code == 401
    refused = browser.log_in("admin")
    assert refused.status_code == 429
    assert "try again in" in refused.text


@pytest.mark.req("UI-10")
def test_passwords_that_are_tried_at_once_are_no_more_than_those_tried_one_by_one(shop: Shop) -> None:
    browser = with_users(shop)
    browser.get("/login")
    fields = {"name": "admin", "csrf": browser.http.cookies["onceward_csrf"]}

    async def guess(*passwords: str) -> list[int]:
        tries = [browser.http.post("/login", data={**fields, "password": each}) for each in passwords]
        return sorted(each.status_code for each in await asyncio.gather(*tries))

    found = asyncio.run(guess(*(f"wrong wrong {number}" for number in range(30))))
    assert found == [401] * FAILURES + [429] * (30 - FAILURES)


@pytest.mark.req("UI-10")
def test_right_passwords_do_not_count(shop: Shop) -> None:
    browser = with_users(shop)
    for _ in range(FAILURES + 2):
        assert browser.log_in("operator").status_code == 303
    for _ in range(FAILURES - 1):
        assert browser.log_in("operator", "wrong wrong wrong").status_code == 401
    assert browser.log_in("operator").status_code == 303


@pytest.mark.req("UI-10")
def test_passwords_are_hashed_in_a_file_that_only_its_owner_can_read(shop: Shop, tmp_path: Path) -> None:
    shop.users.add("ann", PASSWORD, Role.ADMIN)
    written = shop.users.path.read_text()
    assert PASSWORD not in written
    assert written.startswith("ann:admin:scrypt$")
    assert stat.S_IMODE(shop.users.path.stat().st_mode) == 0o600
    assert shop.users.check("ann", PASSWORD) == User("ann", Role.ADMIN)
    assert shop.users.check("ann", "something else") is None
    for name, password in (("a b", PASSWORD), ("ann:admin", PASSWORD), ("ben", "short")):
        with pytest.raises(ConfigurationError):
            shop.users.add(name, password, Role.VIEWER)
    shop.users.path.write_text("broken\n")
    with pytest.raises(ConfigurationError, match="line 1 of"):
        shop.users.lines()
    with pytest.raises(ConfigurationError, match="there is no users file"):
        UsersFile(tmp_path / "none").lines()


@pytest.mark.req("UI-10")
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"role_header": "x-role"}, "nobody has to log in"),
        ({"header": "x-user"}, "needs the addresses of the proxies"),
        ({"header": "x-user", "proxies": ["10.0.0.5", "0.0.0.0/0"]}, "is every address"),
        ({"header": "x-user", "proxies": ["::/0"]}, "is every address"),
        ({"header": "x-user", "proxies": ["proxy"]}, "must be addresses or networks"),
    ],
)
def test_access_that_lets_anybody_in_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Access(**given)


@pytest.mark.req("UI-10")
def test_a_header_counts_only_from_a_listed_proxy(shop: Shop) -> None:
    access = Access(header="x-user", role_header="x-role", proxies=["10.0.0.0/24"])
    site = create(shop.app, access=access)
    sent = {"x-user": "ann", "x-role": "operator"}
    assert "ann" in shop.client(site, "10.0.0.7").get("/", headers=sent).text
    assert shop.client(site, "10.0.1.7").get("/", headers=sent).status_code == 401
    assert shop.client(site, "10.0.0.7").get("/").status_code == 401
    assert (
        "viewer" in shop.client(site, "10.0.0.7").get("/", headers={"x-user": "ann", "x-role": "root"}).text
    )
    for wrong in ({"header": "x-user"}, {"proxies": ["10.0.0.1"]}, {"header": "x", "proxies": ["nowhere"]}):
        with pytest.raises(ConfigurationError):
            Access(**wrong)


@pytest.mark.req("UI-10")
def test_a_trusted_header_that_comes_twice_is_nobody(shop: Shop) -> None:
    """A proxy that adds its header to the client's, instead of replacing that, lets anybody be anyone."""
    access = Access(header="x-user", role_header="x-role", proxies=["10.0.0.7"])
    browser = shop.client(create(shop.app, access=access), "10.0.0.7", "console.example")
    good = [("x-user", "ann"), ("x-role", "viewer")]
    assert browser.get("/", headers=good).status_code == 200
    for forged in (("x-user", "boss"), ("x-role", "admin"), ("X-Role", "")):
        assert browser.get("/", headers=[forged, *good]).status_code == 401, forged


@pytest.mark.req("UI-10")
@pytest.mark.parametrize(("scheme", "secure"), [("https", True), ("https, http", True), ("http", False)])
def test_cookies_behind_a_proxy_with_tls_are_secure(shop: Shop, scheme: str, secure: bool) -> None:
    answer = with_users(shop).get("/login", headers={"x-forwarded-proto": scheme})
    cookie = answer.headers["set-cookie"]
    assert ("Secure" in cookie) is secure
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie


@pytest.mark.req("UI-10", "UI-15")
def test_a_callable_knows_the_users_of_an_application_that_mounts_it(shop: Shop) -> None:
    async def authenticate(connection: Any) -> User | None:
        return User("ann", Role.VIEWER) if connection.headers.get("x-session") == "good" else None

    web = Starlette()
    web.mount("/ops", create(shop.app, access=Access(authenticate=authenticate)))
    browser = shop.client(web, "10.0.0.7", "shop.example")
    browser.http.headers["x-session"] = "good"
    page = browser.get("/ops/")
    assert page.status_code == 200
    assert 'href="/ops/letters"' in page.text
    assert not re.findall(r'(?:href|src|action)="/(?!ops/)', page.text)
    assert browser.get("/ops/static/console.css").status_code == 200
    assert browser.get("/ops/letters").status_code == 200
    browser.http.headers["x-session"] = "bad"
    assert browser.get("/ops/").status_code == 401


@pytest.mark.req("UI-15", "UI-27")
def test_a_mounted_console_has_probes_and_the_metrics_of_sources_and_database(shop: Shop) -> None:
    shop.bury("a")
    users = {"good": User("ann", Role.VIEWER)}
    access = Access(authenticate=lambda connection: users.get(connection.headers.get("x-session", "")))
    web = Starlette()
    web.mount("/ops", create(shop.app, access=access))
    browser = shop.client(web, "10.0.0.7", "shop.example")
    assert browser.get("/ops/livez").json() == {"ok": True, "problems": []}
    assert browser.get("/ops/readyz").status_code == 200
    assert browser.get("/ops/metrics").status_code == 401
    browser.http.headers["x-session"] = "good"
    line = 'onceward_dead_letters{category="business",consumer="charge"} 1.0'
    until(lambda: line in browser.get("/ops/metrics").text)


@pytest.mark.req("UI-27")
def test_a_path_that_begins_like_an_open_one_needs_a_user(shop: Shop) -> None:
    browser = with_users(shop)
    for path in ("/livezzz", "/login/..", "/login/../letters", "/readyz/", "//letters", "/static"):
        assert browser.get(path, headers={"accept": "*/*"}).status_code == 401, path


# ── forms ───────────────────────────────────────────────────────────────────────────────────────────────

POSTS = (
    "/letters/redrive", "/letters/dry-run", "/letters/hold", "/letters/release", "/letters/discard", "/letters/1/edit",
    "/redrives/r1/stop", "/outbox/retry", "/consumers/charge/check", "/consumers/charge/pause",
    "/consumers/charge/resume", "/workers/1/end", "/logout",
    "/login",
)  # fmt: skip


@pytest.mark.req("UI-10")
@pytest.mark.parametrize("path", POSTS)
def test_a_form_of_another_site_is_refused(shop: Shop, path: str) -> None:
    shop.bury("a")
    browser = shop.client()
    browser.get("/")
    fields = {"consumer": "billing", "ids": "1", "reason": "r", "root_cause": "r", "fix_ref": "f"}
    assert browser.send(path, **fields).status_code == 403
    assert browser.send(path, csrf="0" * 64, **fields).status_code == 403
    assert browser.post(path, {"origin": "http://evil.example"}, **fields).status_code == 403
    assert browser.post(path, {"sec-fetch-site": "cross-site"}, **fields).status_code == 403
    assert browser.get(path).status_code in (200, 404, 405)
    assert [each.status for each in shop.letters.find()] == ["open"]
    assert shop.letters.audit() == []


@pytest.mark.req("UI-28")
def test_an_operator_stops_a_redrive_once_with_a_reason(shop: Shop) -> None:
    shop.bury("a", "b")
    browser = with_users(shop)
    browser.log_in("operator")
    cause = {"root_cause": "why", "fix_ref": "v2", "redrive_id": "r1"}
    browser.post("/letters/redrive", consumer="billing", event_type="placed", **cause)
    assert "Stop the redrive" in browser.get("/redrives/r1").text
    assert browser.post("/redrives/r1/stop", reason=" ").status_code == 409
    stopped = browser.post("/redrives/r1/stop", reason="the fix was wrong")
    page = html.unescape(browser.get(stopped.headers["location"]).text)
    assert "The redrive is stopped: 2 letters are open again." in page
    assert "Stop the redrive" not in page
    assert shop.letters.count(Filter(status="open")) == 2
    assert "the fix was wrong" in browser.get("/audit").text
    browser.post("/logout")
    browser.log_in("viewer")
    assert "Stop the redrive" not in browser.get("/redrives/r1").text
    assert browser.post("/redrives/r1/stop", reason="me, too").status_code == 403


@pytest.mark.req("UI-17")
@pytest.mark.parametrize(
    "query", ["after=abc", f"after={'9' * 40}", "after=-1", "until=x", "ids=x", "status=x", "text=%00"]
)
def test_an_address_that_no_page_links_to_is_refused(shop: Shop, query: str) -> None:
    shop.bury("a")
    assert shop.client().get(f"/letters/group?{query}").status_code == 400


@pytest.mark.req("UI-17")
def test_a_group_without_a_status_shows_its_letters(shop: Shop) -> None:
    shop.bury("a")
    link = re.search(r'"(/letters/group[^"]+status=)"', shop.client().get("/letters?status=").text)
    assert link is not None
    page = shop.client().get(html.unescape(link[1]))
    assert page.status_code == 200
    assert "<h1>1 letter</h1>" in html.unescape(page.text)


@pytest.mark.req("UI-17")
@pytest.mark.parametrize("field", ["cause_category", "rca", "rate"])
def test_a_redrive_with_a_value_that_no_form_offers_is_refused(shop: Shop, field: str) -> None:
    shop.bury("a")
    fields = {"consumer": "billing", "ids": "1", "root_cause": "x", "fix_ref": "y", field: "\u0663x"}
    assert shop.client().post("/letters/redrive", **fields).status_code == 400


@pytest.mark.req("UI-10")
def test_each_role_may_do_its_own_and_nothing_more(shop: Shop) -> None:
    shop.bury("a", "b")
    selected = {"consumer": "billing", "ids": "1", "reason": "why"}
    cause = {"root_cause": "r", "fix_ref": "f", "cause_category": "business"}
    needs = {
        "/letters/dry-run": Role.OPERATOR,
        "/letters/hold": Role.OPERATOR,
        "/letters/release": Role.OPERATOR,
        "/letters/discard": Role.ADMIN,
        "/letters/redrive": Role.OPERATOR,
    }
    for role in Role:
        for path, least in needs.items():
            browser = with_users(shop)
            browser.log_in(role.name.lower())
            fields = {**selected, **cause, "ids": "2" if path == "/letters/redrive" else "1"}
            answer = browser.post(path, **fields)
            if role < least:
                assert answer.status_code == 403, (role, path)
                assert f"needs the role {least.name.lower()}" in answer.text
            else:
                assert answer.status_code in (200, 303, 409), (role, path, answer.text)
    assert {each["operator"] for each in shop.letters.audit()} == {"operator", "admin"}


@pytest.mark.req("UI-08")
def test_the_same_form_twice_acts_once_and_a_set_has_nothing_that_arrived_later(shop: Shop) -> None:
    shop.bury("a", "b")
    browser = shop.client()
    page = browser.get(
        f"/letters/group?consumer=billing&group={shop.letters.groups()[0].group}&status=open"
    ).text
    fields = dict(
        re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page.partition('id="redrive"')[2])
    )
    shop.bury("late")
    cause = {"root_cause": "r", "fix_ref": "f", "rate": "10"}
    answers = [browser.post("/letters/redrive", **{**fields, **cause}) for _ in range(2)]
    assert [each.headers["location"] for each in answers] == [f"/redrives/{fields['redrive_id']}"] * 2
    assert {each.message_id: str(each.status) for each in shop.letters.find()} == {
        "a": "redriven", "b": "redriven", "late": "open",
    }  # fmt: skip
    assert len(shop.letters.redrives()) == 1


@pytest.mark.req("UI-08")
def test_several_groups_are_one_set_once_the_filter_is_narrow_enough_for_a_redrive(shop: Shop) -> None:
    shop.bury("a", error="no currency")
    shop.bury("b", error="no customer")
    shop.bury("c", error="something else")
    browser = shop.client()
    for path in ("/letters", "/letters?consumer=billing", "/letters?text=no"):
        assert "To act on several groups" in browser.get(path).text, path
    page = browser.get("/letters?consumer=billing&text=no").text
    [link] = re.findall(r'href="(/letters/group[^"]+)">All 2 letters together', page)
    page = browser.get(html.unescape(link)).text
    fields = dict(
        re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page.partition('id="redrive"')[2])
    )
    assert browser.post("/letters/redrive", **fields, root_cause="r", fix_ref="f").status_code == 303
    assert {each.message_id: str(each.status) for each in shop.letters.find()} == {
        "a": "redriven", "b": "redriven", "c": "open",
    }  # fmt: skip


@pytest.mark.req("UI-08")
@pytest.mark.parametrize("category", [Category.POISON, Category.BUSINESS])
def test_a_set_with_poison_asks_whether_that_is_fixed(shop: Shop, category: Category) -> None:
    shop.bury("a", error="no currency")
    shop.bury("b", error="no end", category=category)
    browser = shop.client()
    for path in ("/letters/group?consumer=billing&text=no&status=open", "/letters/2"):
        asks = re.search(r'name="poison_fixed" value="1" required', browser.get(path).text)
        assert bool(asks) == (category is Category.POISON), path
    assert "poison_fixed" not in browser.get("/letters/1").text


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("UI-14")
def test_hidden_fields_stay_hidden_and_survive_an_edit(shop: Shop, tmp_path: Path) -> None:
    shop.bury(
        "a", card_number="4111", customer={"email": "a@example.com", "name": "Ann"}, token="t0p", currency=""
    )
    for role in Role:
        shop.users.add(role.name.lower(), PASSWORD, role)
    site = create(shop.app, access=Access(users=shop.users), redact=["customer.email"])
    browser = shop.client(site, "10.0.0.7", "console.example")
    browser.log_in("operator")
    assert "Show hidden fields" not in browser.get("/letters/1").text
    assert browser.post("/letters/1").status_code == 403
    for path in ("/letters/1", "/letters/1?whole", "/letters/1/edit"):
        page = browser.get(path).text
        assert "Ann" in page
        assert not [each for each in ("4111", "a@example.com", "t0p") if each in page], path
    edited = {
        "id": "a", "card_number": HIDDEN, "customer": {"email": HIDDEN, "name": "Ann"}, "token": HIDDEN,
        "currency": "EUR",
    }  # fmt: skip
    saved = browser.post("/letters/1/edit", payload=json.dumps(edited), cause="no currency", do="save")
    assert saved.status_code == 303, saved.text
    body = shop.letters.edited_body(1) or b""
    assert b"4111" in body
    assert HIDDEN.encode() not in body
    admin = shop.client(site, "10.0.0.7", "console.example")
    admin.log_in("admin")
    for path in ("/letters/1", "/letters/1?whole"):
        assert "4111" not in admin.get(path).text, "a link shows nothing, and so writes no audit"
    assert admin.send("/letters/1").status_code == 403, "without the token of a form"
    page = admin.get("/letters/1").text
    assert re.search(
        r'<form method="post" action="/letters/1">.*?Show hidden fields</button>', page, re.DOTALL
    )
    assert [each["action"] for each in shop.letters.audit()] == ["edit"]
    shown = admin.post("/letters/1")
    assert (shown.status_code, "4111" in shown.text, "Show hidden fields" in shown.text) == (200, True, False)
    assert [each["action"] for each in shop.letters.audit()] == ["show_payload", "edit"]


@pytest.mark.req("UI-07")
def test_every_answer_forbids_what_the_console_does_not_serve(shop: Shop) -> None:
    browser = shop.client()
    for path in ("/", "/letters", "/static/console.js", "/login", "/nowhere", "/livez"):
        headers = browser.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
    for path in ("/", "/letters", "/audit", "/search", "/limits", "/boundary", "/consumers/charge"):
        page = browser.get(path).text
        assert not re.findall(r"<script(?! src)|\son\w+=|\sstyle=|<style", page), path


@pytest.mark.req("UI-24")
def test_a_browser_keeps_the_files_of_this_version_and_nothing_else(shop: Shop) -> None:
    browser = shop.client()
    named = re.findall(r'(?:href|src)="(/static/[^"]+)"', browser.get("/").text)
    assert len(named) == 4
    for path in named:
        assert "immutable" in browser.get(path).headers["cache-control"]
        assert browser.get(f"{path.partition('?')[0]}?v=earlier").headers["cache-control"] == "no-store"
    assert browser.get("/").headers["cache-control"] == "no-store"


@pytest.mark.req("UI-06")
def test_errors_are_pages_that_say_what_to_do(shop: Shop) -> None:
    browser = shop.client()
    assert browser.get("/nowhere").status_code == 404
    for path, said in {
        "/letters/99": "there is no dead letter 99",
        f"/letters/{'9' * 30}": "there is no dead letter",
        "/letters/99/edit": "there is no dead letter 99",
        "/redrives/nothing": "there is no redrive 'nothing'",
        "/consumers/nobody": "there is no consumer 'nobody'",
        "/workers/7/end": "There is no such page",
    }.items():
        page = browser.get(path)
        assert (page.status_code, said in html.unescape(page.text)) == (404, True), (path, page.text)
    nowhere = browser.post("/letters/99/effect", happened="yes", reason="r", effect="e")
    assert nowhere.status_code == 404
    assert "category must be one of" in browser.get("/letters?category=none").text.replace("&#39;", "'")
    with shop.engine.begin() as connection:
        connection.execute(text("DROP TABLE onceward_outbox"))
    assert browser.get("/outbox").status_code in (400, 503)
    refused = browser.post("/letters/redrive", consumer="billing", ids="7", root_cause="r", fix_ref="f")
    assert refused.status_code == 409
    assert "no letter of consumer" in refused.text


@pytest.mark.req("UI-16")
def test_what_a_message_brings_controls_no_page_and_forms_send_it_back_unchanged(shop: Shop) -> None:
    odd = "a\x1b[31m\x9b1m\u202egpj\u2066\x07"
    shop.bury(odd, error=odd, note=odd)
    shop.letters.hold(Filter(consumer="billing"), reason=odd, operator=odd)
    browser = shop.client()
    group = re.findall(r'href="(/letters/group[^"]+)"', browser.get("/letters").text)[0].replace("&amp;", "&")
    for path in ("/letters", group, "/letters/1", "/letters/1/edit", "/audit"):
        page = browser.get(path).text
        shown = re.sub(r'(?<=value=")[^"]*(?=")', "", page)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown), path
        assert "\\x1b[31m" in shown or "\\u001b[31m" in shown or path == "/letters", path
    edit = browser.get("/letters/1/edit").text
    payload = html.unescape(re.findall(r"<textarea[^>]*>(.*?)</textarea>", edit, re.DOTALL)[0])
    assert json.loads(payload)["note"] == odd
    searched = browser.get("/search", params={"id": odd}).text
    assert f'value="{odd}"' in searched


@pytest.mark.req("UI-17")
def test_a_session_ends_when_its_user_logs_out(shop: Shop) -> None:
    site = create(shop.app, access=Access(users=shop.users))
    shop.users.add("ann", PASSWORD, Role.OPERATOR)
    browser = shop.client(site)
    browser.log_in("ann")
    stolen = dict(browser.http.cookies)
    assert browser.get("/letters").status_code == 200
    assert browser.post("/logout").status_code == 303
    browser.http.cookies.update(stolen)
    assert browser.get("/letters").status_code in (303, 401)
    browser.http.cookies.clear()
    browser.log_in("ann")
    assert browser.get("/letters").status_code == 200


@pytest.mark.req("UI-17")
@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, b"x=1&" * 2000),
        ({}, b"\xff" * 50),
        ({"origin": "http://[::1"}, b""),
        ({"origin": "null"}, b""),
        ({"content-length": "\xb2"}, b""),
        ({"content-length": "9" * 5000}, b""),
        ({"cookie": "onceward_session=ann|\xb2|\xe9; onceward_csrf=\xe9"}, b""),
        ({"cookie": "onceward_session=" + "|" * 50}, b""),
        ({"content-type": "multipart/form-data; boundary=\xe9"}, b"--"),
    ],
)
def test_a_form_that_nobody_sends_is_refused(shop: Shop, headers: dict[str, str], body: bytes) -> None:
    shop.users.add("ann", PASSWORD, Role.OPERATOR)
    for access in (Access(), Access(users=shop.users)):
        browser = shop.client(create(shop.app, access=access))
        raw = {"host": "127.0.0.1", **headers}
        sent = {name: value.encode("latin-1") for name, value in raw.items()}
        for path in ("/letters/hold", "/login"):
            assert 400 <= asyncio.run(browser.http.post(path, content=body, headers=sent)).status_code < 500
