"""`onceward balance` while one server of an app is down: the others are still reported."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onceward import Onceward, Transaction
from onceward.cli.main import app as commands
from onceward.connectors.urls import Address
from onceward.console.backstage import Backstage
from onceward.inbox import Inbox

DOWN = "redis://:hunter2@127.0.0.1:1/mails"
WHY = "cannot query Redis at 127.0.0.1:1/0"

pytestmark = pytest.mark.req("CC-071")


def shop(folder: Path, database: str | None = None) -> Onceward:
    """One consumer whose source works, with a message in it, and one whose broker is down."""
    app = Onceward("shop", database=database or f"sqlite:///{folder}/shop.db")
    orders = f"sqlite:///{folder}/orders.db"
    app.consumer(DOWN, name="mail")(lambda order: None)
    app.consumer(orders, name="charge")(lambda order: None)
    with Address(orders).open(asynchronous=False) as connector:
        connector.dispatch_transactions([Transaction(payload={"total": 1})])
    return app


def balance(app: Onceward, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    module: Any = SimpleNamespace(app=app)
    monkeypatch.setitem(sys.modules, "shop_of_this_test", module)
    arguments = ["balance", "shop_of_this_test:app", *options]
    return CliRunner().invoke(commands, arguments, env={"COLUMNS": "250", "NO_COLOR": "1"})


def test_the_others_are_shown_and_the_verdict_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = balance(shop(tmp_path), monkeypatch)
    assert result.exit_code == 3, result.output
    assert re.search(r"mail +\? +\? +\? +\? +\?", result.stdout)
    assert re.search(r"charge +1 .* yes", result.stdout)
    assert f"Unknown whether it holds: mail: {WHY}" in result.stderr
    assert "It holds for 1 of 2 consumers." in result.stdout
    assert "hunter2" not in result.output


def test_json_has_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = balance(shop(tmp_path), monkeypatch, "--json")
    assert result.exit_code == 3
    mail, charge = json.loads(result.stdout)
    assert (mail["consumer"], mail["verdict"], mail["appended"]) == ("mail", "unknown", None)
    assert WHY in mail["unknown"][0]
    assert (charge["consumer"], charge["verdict"], charge["pending"]) == ("charge", "holds", 1)


def test_a_missing_message_of_another_consumer_still_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shop(tmp_path)
    with Address(f"sqlite:///{tmp_path}/orders.db").open(asynchronous=False) as connector:
        connector.dispatch_transactions([Transaction(payload={"total": 2})])
    with closing(sqlite3.connect(tmp_path / "orders.db")) as connection:
        connection.execute("DELETE FROM messages WHERE seq = 1")
        connection.commit()
    result = balance(app, monkeypatch)
    assert result.exit_code == 1
    assert "It does not hold: charge: 1 message is missing" in result.stderr
    assert f"mail: {WHY}" in result.stderr


def test_without_its_database_every_consumer_of_an_app_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shop(tmp_path, "postgresql://me:hunter2@127.0.0.1:1/shop")
    result = balance(app, monkeypatch)
    assert result.exit_code == 3, result.output
    assert "Unknown whether it holds: mail, charge, outbox: cannot query database" in result.stderr
    assert "It holds for 0 of 3 consumers and targets." in result.stdout
    assert "hunter2" not in result.output


@pytest.mark.req("OB-20")
def test_a_sink_that_is_down_leaves_only_its_target_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    engine = app.create_engine()
    Inbox(engine).migrate()
    with engine.begin() as connection:
        for sink in (DOWN, f"sqlite:///{tmp_path}/orders.db"):
            app.outbox(connection).send(sink, {"total": 1})
    engine.dispose()
    result = balance(app, monkeypatch)
    assert result.exit_code == 3, result.output
    assert WHY in result.stderr
    assert len(re.findall(r"outbox → .* 1 +0 +0 +1 ", result.stdout)) == 2
    assert "It holds for 1 of 2 consumers and targets." in result.stdout
    assert "hunter2" not in result.output


@pytest.mark.req("UI-06")
def test_the_console_shows_the_guarantee_and_an_unknown_balance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backstage, "_check", lambda self: None)  # the one in the background
    stage = Backstage(shop(tmp_path))
    try:
        stage.check("mail")
        stage.check("charge")
        mail, charge = stage.checked["mail"], stage.checked["charge"]
    finally:
        stage.stop()
    assert mail.balance is not None
    assert (mail.balance.verdict, mail.problem) == ("unknown", None)
    assert WHY in mail.balance.unknown[0]
    assert mail.guarantee is not None
    assert charge.balance is not None
    assert charge.balance.holds
