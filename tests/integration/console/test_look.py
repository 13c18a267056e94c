"""Words and units of the console's pages."""

from __future__ import annotations

import html
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from onceward import Contract, Onceward
from onceward._sync import run_blocking
from onceward.console import create
from onceward.console.backstage import Backstage
from onceward.console.look import (
    at_step,
    commands,
    details,
    in_contract,
    in_policy,
    in_short,
    rate,
    shortened,
)
from onceward.console.overview import picture, state_of
from onceward.db.errors import LockTimeoutError
from onceward.deadletters import DeadLetters, Filter
from onceward.deadletters.groups import normalize
from tests.integration.console.test_access import Browser, Shop
from tests.integration.console.test_holds import consumer_status
from tests.support.wait import until


@pytest.mark.req("UI-06")
def test_the_overview_knows_at_once_what_an_operator_did_with_letters_here(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.bury("a", "b", "c", "d")
    browser = shop.client()

    def dead() -> str:
        [found] = re.findall(r'Dead letters</span><strong><a href="/letters">([^<]+)', browser.get("/").text)
        return str(found)

    until(lambda: dead() == "4")
    cause = {"consumer": "billing", "root_cause": "r", "fix_ref": "f", "redrive_id": "r1"}
    assert browser.post("/letters/redrive", ids="1,2", **cause).status_code == 303
    assert dead() == "2"
    assert browser.post("/letters/discard", consumer="billing", ids="3", reason="r").status_code == 303
    assert dead() == "1"
    assert browser.post("/redrives/r1/stop", reason="r").status_code == 303
    assert dead() == "3"


@pytest.mark.req("UI-08")
def test_a_letter_leads_back_to_its_group(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.bury("a", "b", error="no currency")
    shop.bury("c", error="no customer")
    browser = shop.client()
    for letter, others in ((1, 2), (3, 1)):
        [link] = re.findall(r'href="(/letters/group[^"]+)"', browser.get(f"/letters/{letter}").text)
        page = browser.get(html.unescape(link)).text
        assert f"<h1>{others} letter" in page
        assert f'href="/letters/{letter}"' in page
    shop.letters.discard(Filter(ids=(1,)), reason="r", operator="o")
    [link] = re.findall(r'href="(/letters/group[^"]+)"', browser.get("/letters/1").text)
    assert 'href="/letters/1"' in browser.get(html.unescape(link)).text, "among the discarded ones"


@pytest.mark.req("UI-08")
def test_a_set_of_several_groups_shows_its_own_first_and_last_and_all_its_types(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.bury("a", error="no account")
    shop.bury("b", "c", error="no currency")
    shop.bury("d", error="no customer")
    with shop.engine.begin() as connection:
        for id, first, died, type in (
            (1, 100, 300, "x"),
            (2, 200, 400, "x"),
            (3, 200, 400, "x"),
            (4, 300, 900, "y"),
        ):
            connection.execute(
                text(
                    "UPDATE onceward_dead_letters SET first_failed_at = :first, died_at = :died, event_type = :type "
                    "WHERE id = :id"
                ),
                {"id": id, "first": first, "died": died, "type": type},
            )
    page = shop.client().get("/letters/group?consumer=billing&text=no&status=open").text
    [line] = [each for each in page.splitlines() if "· first" in each]
    assert re.findall(r'title="\S+ (\S+) UTC"', line) == ["00:01:40", "00:15:00"], line
    assert " · x, y · " in line


@pytest.mark.req("UI-25")
@pytest.mark.parametrize(
    ("stage", "pid", "state"),
    [("running", None, "restarting"), ("draining", None, "not running"), ("running", 7, "not running")],
)
def test_a_consumer_whose_worker_is_started_again_is_restarting(
    stage: str, pid: int | None, state: str
) -> None:
    app = Onceward("shop")
    app.consumer("sqlite:///orders.db", name="charge")(lambda order: None)
    backstage = Backstage(app, state=dict)
    worker = {"worker": 1, "pid": pid, "consumers": [], "earlier": {"charge": {"succeeded": 1, "failed": 0}}}
    backstage.states = [{"stage": stage, "workers": [worker]}]
    assert state_of(backstage, "charge", backstage.status("charge")) == state


@pytest.mark.req("UI-25")
def test_a_worker_that_has_not_said_what_it_runs_is_starting() -> None:
    app = Onceward("shop")
    app.consumer("sqlite:///orders.db", name="charge")(lambda order: None)
    backstage = Backstage(app, state=dict)
    worker: dict[str, Any] = {"worker": 1, "pid": 7, "starting": True, "consumers": [], "earlier": {}}
    backstage.states = [{"stage": "running", "workers": [worker]}]
    assert state_of(backstage, "charge", []) == "starting"
    worker["earlier"] = {"charge": {"succeeded": 1, "failed": 0}}
    assert state_of(backstage, "charge", []) == "restarting"
    worker["starting"] = False
    assert state_of(backstage, "charge", []) == "not running"


@pytest.mark.req("UI-18", "UI-29")
def test_the_overview_says_which_attempt_runs_long_and_may_have_locked_the_database() -> None:
    app = Onceward("shop", database="sqlite:///shop.db")
    promised = Contract(consumer_id="a", event_types=["*"], owner_team="a", idempotency_mechanism="dedup row")
    app.consumer("sqlite:///orders.db", contract=promised, name="charge")(lambda order, session: None)
    app.consumer("sqlite:///mails.db", name="notify")(lambda mail: None)
    backstage = Backstage(app, state=dict)

    def picture_of(problem: str | None, seconds: float) -> dict[str, Any]:
        running = {"id": "a", "seconds": 900.0, "step": "process", "attempt": 1}
        mine = consumer_status("charge", flights=[{**running, "attempt_seconds": seconds}])
        other = consumer_status("notify", problem=problem, flights=[{**running, "attempt_seconds": 800.0}])
        worker = {"worker": 1, "pid": 7, "live": True, "consumers": [mine, other]}
        backstage.states = [{"stage": "running", "workers": [worker]}]
        return picture(backstage)

    quiet = picture_of(None, 65.0)
    assert ([each["longest"] for each in quiet["rows"]], quiet["locks"]) == ([65.0, 800.0], None)
    locked = picture_of("LockTimeoutError: another connection …", 65.0)
    assert locked["locks"]["name"] == "charge", "only it has a transaction"
    short = picture_of("LockTimeoutError: another connection …", 2.0)
    assert (short["rows"][0]["longest"], short["locks"]) == (None, None)
    assert (
        at_step({"step": "process", "attempt": 1, "attempt_seconds": 65.0})
        == "process, attempt 1, for 1 min 5 s"
    )
    assert at_step({"step": "process", "attempt": 1, "attempt_seconds": 0.2}) == "process, attempt 1"


@pytest.mark.req("UI-25")
@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("lease", 5, "5 s"),
        ("gap_timeout", 300, "5 min"),
        ("tolerates", None, "–"),
        ("event_types", ["paid", "sent"], "paid, sent"),
        ("event_types", [], "–"),
        ("replay_days", 0, "0"),
        ("owner_team", "money", "money"),
    ],
)
def test_a_contract_has_units(name: str, value: Any, shown: str) -> None:
    assert in_contract(value, name) == shown


@pytest.mark.req("UI-25")
@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("policy.steps.process.retry.timeout", 1.0, "1 s"),
        ("policy.loop.empty_queue.backoff_cap", 0.5, "0.5 s"),
        ("policy.loop.timeout", None, "None"),
        ("policy.loop.batch.size", 100, "100"),
        ("source", "memory://a", "memory://a"),
    ],
)
def test_a_policy_has_units(name: str, value: Any, shown: str) -> None:
    assert in_policy(value, name) == shown


@pytest.mark.req("UI-25")
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "unknown"),
        (0, "0/s"),
        (0.01, "under 0.1/s"),
        (0.05, "0.1/s"),
        (12.34, "12.3/s"),
        (1234.5, "1,234/s"),
    ],
)
def test_a_rate_that_is_not_zero_is_not_shown_as_zero(value: float | None, shown: str) -> None:
    assert rate(value) == shown


@pytest.mark.req("UI-25")
def test_an_entry_of_the_audit_is_words_with_a_time() -> None:
    entry = {
        "filter": {"consumer": "billing", "until": 1794961016.02},
        "letters": 9990,
        "fix_ref": "release 2",
    }
    assert details(entry) == (
        "filter: consumer billing, until 2026-11-18 00:16:56 UTC · letters: 9,990 · fix ref: release 2"
    )


@pytest.mark.req("UI-06")
def test_a_new_app_without_tables_has_pages_that_say_so(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    promised = Contract(
        consumer_id="billing", event_types=["*"], owner_team="a", idempotency_mechanism="dedup row"
    )
    app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=promised, name="charge")(
        lambda order, session: None
    )
    site = create(app)
    browser = Browser(site, "127.0.0.1", "127.0.0.1")
    for path in ("/", "/consumers/charge", "/limits", "/search?id=x", "/boundary"):
        assert browser.get(path).status_code == 200, path
    for path in ("/letters", "/letters/1", "/redrives", "/outbox", "/audit"):
        answer = browser.get(path)
        assert (answer.status_code, "does not have all of onceward" in answer.text) == (503, True), path
    site.state.console.backstage.stop()


@pytest.mark.req("UI-07", "UI-25")
def test_commands_in_sentences_are_code_and_nothing_else_is_markup() -> None:
    assert commands("run `onceward run shop:app`") == "run <code>onceward run shop:app</code>"
    odd = commands("`<b>` and `a<b>c` and \u202ex ` <script>")
    assert "<b>" not in odd
    assert "<script>" not in odd
    assert "\u202e" not in odd


@pytest.mark.req("UI-06")
def test_the_audit_has_pages(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    app.consumer(f"sqlite:///{tmp_path}/orders.db", name="charge")(lambda order: None)
    letters = DeadLetters(app.create_engine())
    letters.migrate()
    for number in range(205):
        run_blocking(letters.operations.note("ann", "did", {"what": f"number-{number}."}))
    site = create(app)
    browser = Browser(site, "127.0.0.1", "127.0.0.1")
    path, seen = "/audit", []
    while path:
        page = html.unescape(browser.get(path).text)
        seen += re.findall(r"number-(\d+)\.", page)
        path = found[1] if (found := re.search(r'href="(/audit\?before=\d+)"', page)) else ""
    assert seen == [str(number) for number in reversed(range(205))]
    assert browser.get("/audit?before=x").status_code == 400
    site.state.console.backstage.stop()


@pytest.mark.req("UI-25")
@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (["consuming", "stopping"], "running"),
        (["consuming", "starting"], "running"),
        (["consuming", "waiting"], "outage"),
        (["starting", "stopping"], "starting"),
        (["ended"], "stopping"),
    ],
)
def test_a_consumer_runs_while_one_of_its_workers_does(states: list[str], shown: str) -> None:
    app = Onceward("shop")
    app.consumer("sqlite:///orders.db", name="charge")(lambda order: None)
    reported = [{**consumer_status("charge", state=each), "live": True} for each in states]
    assert state_of(Backstage(app), "charge", reported) == shown


@pytest.mark.req("UI-25")
def test_a_locked_database_is_named_in_words_for_operators() -> None:
    error = LockTimeoutError(
        "another connection kept the database locked (connect_args={'timeout': seconds})"
    )
    assert in_short(f"LockTimeoutError: {error}") == "another transaction has locked the database"
    assert in_short("ConnectionError: refused") == "ConnectionError: refused"
    assert in_short(None) == ""


@pytest.mark.req("UI-25")
def test_an_action_that_a_lock_keeps_from_being_done_says_so(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    contract = Contract(consumer_id="a", event_types=["*"], owner_team="a", idempotency_mechanism="dedup row")
    app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=contract, name="charge")(
        lambda order, session: None
    )
    DeadLetters(app.create_engine()).migrate()
    browser = Browser(create(app), "127.0.0.1", "127.0.0.1")
    with sqlite3.connect(tmp_path / "shop.db") as other:
        other.execute("BEGIN IMMEDIATE")
        answer = browser.post("/consumers/charge/pause", reason="r")
    assert answer.status_code == 503
    page = answer.text
    assert "The database is locked" in page
    assert "Nothing was changed" in page
    assert "connect_args" not in page


@pytest.mark.req("UI-25")
def test_a_message_that_was_cut_ends_in_an_ellipsis() -> None:
    assert shortened(normalize("x" * 500).message) == "x" * 300 + "…"
    assert shortened(normalize("x" * 299).message) == "x" * 299
