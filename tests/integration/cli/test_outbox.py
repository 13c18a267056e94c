"""`onceward outbox`, as operators and scripts use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from onceward.backoff import Backoff
from onceward.cli.main import app
from onceward.deadletters import DeadLetters
from onceward.outbox.relay import RelayRules
from tests.support.outbox import OutboxWorld, drain
from tests.support.wait import until

WIDE = {"COLUMNS": "250", "NO_COLOR": "1"}


class Desk:
    """An operator's terminal, beside an outbox with a published, a failed and a delayed message."""

    def __init__(self, directory: Path) -> None:
        self.url = f"sqlite:///{directory}/shop.db"
        self.world = OutboxWorld(self.url)
        self.relay = self.world.relay(rules=RelayRules(Backoff(3600.0)))
        self.world.sink.refuse = lambda each: (
            RuntimeError("no such street") if each.payload == {"id": 2} else None
        )
        self.published, self.failed = self.world.send({"id": 1}, {"id": 2})
        (self.delayed,) = self.world.send({"id": 3}, delay=3600, target="redis://:secret-word@host/orders")
        drain(self.relay)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["outbox", *arguments, "--database", self.url], env=WIDE)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.req("OB-17")
def test_list_and_show(desk: Desk) -> None:
    shown = desk.run("list").output
    assert desk.failed in shown
    assert desk.delayed in shown
    assert desk.published not in shown
    assert "no such street" in shown
    assert "1 delayed, 1 held, 1 published" in shown
    assert "secret-word" not in shown
    (row,) = json.loads(desk.run("list", "--state", "published", "--json").stdout)
    assert (row["id"], row["target"], row["attempts"]) == (desk.published, "redis://x/ship", 1)
    one = json.loads(desk.run("show", desk.delayed, "--json").stdout)
    assert (one["payload"], one["state"]) == ({"id": 3}, "delayed")
    assert "secret-word" not in desk.run("show", desk.delayed).output
    assert desk.run("show", "nothing").exit_code == 1
    assert desk.run("list", "--state", "lost").exit_code == 2


@pytest.mark.req("OB-17")
def test_retry(desk: Desk) -> None:
    desk.world.sink.refuse = lambda _: None
    done = desk.run("retry", desk.failed, "--operator", "ann", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"retried": [desk.failed]})
    until(lambda: (drain(desk.relay), len(desk.world.sink.arrived) == 2)[1])
    assert desk.run("retry", desk.failed).exit_code == 1
    assert DeadLetters(desk.world.engine).audit(limit=1)[0]["operator"] is not None


@pytest.mark.req("OB-17")
def test_purge(desk: Desk) -> None:
    assert "0 messages removed" in desk.run("purge").output
    assert "1 message removed" in desk.run("purge", "--days", "0").output
    assert desk.world.rows() == ["held", "delayed"]
