"""Payloads of dead letters that a page cannot show as they are, or must not."""

from __future__ import annotations

import html
import os
import runpy
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from onceward import ExceptionCategory, Onceward, TransactionException
from onceward.app.build import open_task
from onceward.connectors import SqliteConnector
from onceward.connectors.codec import encode
from onceward.console import create
from onceward.console.backstage import Backstage
from onceward.console.letters import too_large
from onceward.deadletters import Burial, Category, DeadLetters, Filter
from onceward.deadletters.dry_run import PredictedOutcome, Prediction
from onceward.deadletters.row_watch import TableDiff, TableWrites
from onceward.inbox import Inbox
from onceward.transaction import Transaction
from tests.integration.console.test_access import Browser, Shop


def nested(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


@pytest.mark.req("UI-17")
def test_a_payload_that_is_too_large_or_too_deep_does_not_keep_its_letter_from_being_shown(
    tmp_path: Path,
) -> None:
    shop = Shop(tmp_path)
    shop.bury("large", text="x" * 3_000_000)
    shop.bury("too-deep", deep=nested(200))
    shop.bury("deep", deep=nested(190))
    browser = shop.client()
    large = browser.get("/letters/1")
    assert (large.status_code, len(large.content) < 200_000) == (200, True)
    assert "these are its first 100,000 characters" in large.text
    assert "nested too deep" in browser.get("/letters/2").text
    for number in (1, 2):
        assert "/edit" not in browser.get(f"/letters/{number}").text
        assert browser.get(f"/letters/{number}/edit").status_code == 400
    assert "nested too deep" not in browser.get("/letters/3").text
    assert browser.get("/letters/3/edit").status_code == 200


@pytest.mark.req("UI-14")
def test_an_edit_shows_no_hidden_value_neither_of_the_payload_nor_of_rows(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    contract = Shop(tmp_path).contract

    @app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=contract)
    def charge(order: dict[str, Any], session: Any) -> None:
        session.execute("INSERT INTO bills (id, iban) VALUES (:id, :iban)", order)

    engine = app.create_engine()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE bills (id TEXT PRIMARY KEY, iban TEXT)"))
    letters = DeadLetters(engine)
    Inbox(engine).register(contract)
    sent = Transaction(id="a", payload={"id": "a", "iban": "DE00 SECRET"})
    burial = Burial(
        consumer="billing",
        origin="here",
        message_id="a",
        body=encode(sent),
        category=Category.BUSINESS,
        reason="x",
    )
    letters.bury(burial)
    browser = Browser(create(app), "127.0.0.1", "127.0.0.1")
    page = browser.get("/letters/1/edit").text
    assert "SECRET" not in page, "nor for an admin: that is a step of its own, which the audit records"
    payload = '{"id": "b", "iban": "••• hidden"}'
    tried = html.unescape(browser.post("/letters/1/edit", payload=payload, cause="x", do="try").text)
    assert "it would succeed" in tried
    assert "bills" in tried
    assert "SECRET" not in tried


@pytest.mark.req("UI-25")
def test_a_dry_run_says_that_it_used_code_that_has_changed_since(tmp_path: Path) -> None:
    file = tmp_path / "shop_that_changes.py"
    file.write_text("def charge(order: dict) -> None:\n    pass\n")
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    app.consumer(f"sqlite:///{tmp_path}/orders.db", contract=None)(runpy.run_path(str(file))["charge"])
    backstage = Backstage(app)
    assert backstage.changed_file("charge") is None
    later = time.time() + 10
    os.utime(file, (later, later))
    assert backstage.changed_file("charge") == "shop_that_changes.py"
    file.unlink()
    assert backstage.changed_file("charge") is None
    assert backstage.changed_file("nobody") is None


@pytest.mark.req("UI-25")
def test_a_dry_run_says_which_tables_are_too_large_to_be_compared() -> None:
    small = TableDiff("small", ({"id": 1},), ())
    writes = TableWrites("small", "INSERT", 1, 1), TableWrites("large", "INSERT", 1, 2)
    outcome = PredictedOutcome.SUCCEED
    tried = Prediction(transaction_id="a", outcome=outcome, statements=writes, tables=(small,))
    assert too_large([tried]) == ["large"]


@pytest.mark.req("UI-26")
@pytest.mark.parametrize("has_contract", [True, False])
def test_a_letter_shows_where_the_code_was_that_failed(tmp_path: Path, has_contract: bool) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    queue = f"sqlite:///{tmp_path}/queue.db?on_failure=dead_letter"

    def fail() -> None:
        raise TransactionException("no <b>", category=ExceptionCategory.BUSINESS)  # here it was

    if has_contract:
        app.consumer(queue, contract=Shop(tmp_path).contract, name="charge")(lambda order, session: fail())
    else:
        app.consumer(queue, name="charge")(lambda order: fail())
    with SqliteConnector(tmp_path / "queue.db") as source:
        source.dispatch_transactions([Transaction(id="a", payload={"card": "4111"})])
    with open_task(app, app.consumers.charge) as task:
        task.consume_transactions()
    letter = DeadLetters(app.create_engine()).find(Filter(status="open"), limit=1)[0]
    assert "in fail" in (letter.history[-1].where or "")
    assert "4111" not in (letter.history[-1].where or "")
    page = Browser(create(app), "127.0.0.1", "127.0.0.1").get(f"/letters/{letter.id}").text
    assert "# here it was" in page
    assert "no &lt;b&gt;" in page
