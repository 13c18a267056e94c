"""Messages that try to control the terminal in which a log or a command is read, and URLs with passwords."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from onceward._text import printable_lines
from onceward.connectors import SqliteConnector
from onceward.inbox import Inbox
from onceward.testing.inbox.samples import contract
from onceward.transaction import Transaction
from tests.support.commands import onceward
from tests.support.run.world import COMMAND, Site
from tests.support.silence import silent_server
from tests.support.wait import until

SECRET = "hUnt3rTwo"
NASTY = "\x1b[31m\x1b]0;owned\x07\r\n2026-01-01T00:00:00.000+00:00 INFO    all is well\u202e\x9b2J\u2028\x85"
"""Colors, a title, a forged line, reversed text, a cleared screen, and what else ends a line."""

SHOP = """
import logging
from onceward import Onceward, Transaction
from onceward.inbox import Contract

app = Onceward("shop", database="sqlite:///inbox.db")
log = logging.getLogger("shop")
POLICY = {"loop": {"empty_queue": {"backoff": 0.01, "backoff_cap": 0.01}}}

@app.consumer("sqlite:///plain.db?max_deliveries=1", policy=POLICY)
def plain(order: dict, transaction: Transaction) -> None:
    log.warning("got %s of %s", order["note"], transaction.id)
    raise RuntimeError(f"no {order['note']}") from KeyError(order["note"])

@app.consumer("sqlite:///kept.db?max_deliveries=1", policy=POLICY, contract=Contract(
    consumer_id="kept", event_types=["order"], owner_team="shop", idempotency_mechanism="transactional"))
def kept(order: dict, session) -> None:
    raise ValueError(order["note"])
"""


def commands(number: int) -> list[list[str]]:
    database = ["--database", "sqlite:///inbox.db"]
    return [
        ["dlq", "list", *database],
        ["dlq", "list", "--group", *database],
        *(["dlq", "show", str(each), *database] for each in range(1, number + 1)),
        ["dlq", "hold", "1", "--reason", NASTY.replace("\r", ""), "--operator", f"ann{NASTY}", *database],
        ["inbox", "stats", *database],
        ["inbox", "effects", *database],
        ["inbox", "hold", "kept", NASTY, "--reason", NASTY, "--operator", "ann", *database],
        ["inbox", "holds", *database],
        ["consumers", "list", *database],
        ["audit", "list", *database],
        ["trace", "last"],
        ["trace", f"id{NASTY}"],
        ["balance", "shop:app"],
        ["balance", "shop:app", "--verbose"],
    ]


@pytest.mark.usual("console")
@pytest.mark.req("ST-06")
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_hostile_message_controls_no_terminal_and_forges_no_line(tmp_path: Path, log_format: str) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    for queue in ("plain", "kept"):
        with SqliteConnector(tmp_path / f"{queue}.db") as source:
            metadata = {"event_type": f"order{NASTY}", "aggregate_id": NASTY, NASTY: NASTY}
            orders = [
                Transaction(id=f"id{NASTY}", payload={"note": NASTY, NASTY: 1}, metadata=metadata),
                Transaction(payload=NASTY, metadata={"event_type": "order", "schema_version": NASTY}),
                Transaction(payload={"note": NASTY}, metadata={"event_type": "order"}),
            ]
            source.dispatch_transactions(orders)
    environment = {**os.environ, "ONCEWARD_TRACE_FILE": "spans.jsonl", "COLUMNS": "200"}
    ended = subprocess.run(
        [*COMMAND, "shop:app", "--drain", "--log-format", log_format],
        cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    log = (ended.stdout + ended.stderr).decode()
    assert "got " in log
    assert printable_lines(log) == log
    assert not [line for line in log.splitlines() if line.startswith("2026-01-01")]
    if log_format == "json":
        assert all(map(json.loads, log.splitlines()))

    with sqlite3.connect(tmp_path / "inbox.db") as database:
        [(letters,)] = database.execute("SELECT count(*) FROM onceward_dead_letters").fetchall()
    assert letters == 6
    if log_format == "json":
        return  # the commands show the same
    for command in commands(letters):
        shown = onceward(*command, cwd=tmp_path, env={**environment, "PYTHONPATH": str(tmp_path)})
        text = shown.stdout + shown.stderr
        assert printable_lines(text) == text, command
        assert "Traceback" not in text or command[:2] == ["dlq", "show"], text
        assert not [line for line in text.splitlines() if line.startswith("2026-01-01")], command


@pytest.mark.req("ST-05")
def test_no_log_metric_or_status_of_a_run_shows_the_password_of_a_source(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with silent_server() as server:
        source = f"redis://ann:12/{SECRET}@127.0.0.1:{server.port}/0/orders"
        with site.run("--health", "127.0.0.1:0", RUN_SOURCE=source) as run:
            until(lambda: run.has_said("%2F") or run.process.poll() is not None)
            assert SECRET not in run.log
        escaped = source.replace("12/", "12%2F")
        with site.run("--health", "127.0.0.1:0", RUN_SOURCE=escaped) as run:
            until(server.heard.is_set)
            for page in ("/metrics", "/progress", "/readyz", "/livez"):
                assert SECRET not in run.get(page)[1]
            until(lambda: run.has_said("waiting for its source"))
            assert SECRET not in run.log
            assert SECRET not in run.get("/readyz")[1]


@pytest.mark.req("ST-05")
def test_no_row_of_the_audit_keeps_a_password(tmp_path: Path) -> None:
    words = f"moved to postgresql://u:{SECRET}@h/db, password={SECRET}"
    database = ["--database", f"sqlite:///{tmp_path}/inbox.db"]
    engine = create_engine(database[1])
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(contract("billing"))
    engine.dispose()
    for command in (
        ["inbox", "hold", "billing", "a", "--reason", words, "--operator", f"ann token={SECRET}"],
        ["inbox", "release", "billing", "a", "--reason", words, "--operator", "ann"],
        ["inbox", "purge", "--operator", f"postgresql://u:{SECRET}@h"],
    ):
        subprocess.run([sys.executable, "-m", "onceward", *command, *database], check=True, timeout=60)
    with sqlite3.connect(tmp_path / "inbox.db") as rows:
        found = rows.execute("SELECT * FROM onceward_audit").fetchall()
    assert len(found) >= 4
    assert SECRET not in repr(found)
    assert "postgresql://u:***@h/db" in repr(found)
