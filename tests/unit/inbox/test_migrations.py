"""The inbox tables, as plain SQL."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from onceward.errors import ConfigurationError
from onceward.inbox import Contract, Inbox
from onceward.storage import migrations

CONTRACT = Contract(
    consumer_id="billing", event_types=["*"], owner_team="payments", idempotency_mechanism="inbox"
)


def test_the_printed_migrations_run_by_hand_are_all_that_is_needed(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/by-hand.db")
    inbox = Inbox(engine)
    with sqlite3.connect(tmp_path / "by-hand.db") as connection:
        connection.executescript(inbox.migrations_sql())
    connection.close()
    assert inbox.migrate() == []
    inbox.register(CONTRACT)
    engine.dispose()


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_every_migration_has_a_way_back(database: str) -> None:
    made = " ".join(each.up for each in migrations.migrations(database))
    dropped = " ".join(each.down for each in migrations.migrations(database))
    tables = {line.split()[2] for line in made.splitlines() if line.startswith("CREATE TABLE")}
    tables -= set(re.findall(r"ALTER TABLE (\w+) RENAME TO", made))
    assert [table for table in tables if f"DROP TABLE {table};" not in dropped] == []


def test_the_way_back_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "back.db"
    engine = create_engine(f"sqlite:///{path}")
    Inbox(engine).migrate()
    with engine.begin() as connection:
        for each in reversed(migrations.migrations("sqlite")):
            for statement in migrations.statements(each.down):
                connection.execute(text(statement))
        left = set(connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars())
    assert left <= {migrations.TABLE, "sqlite_sequence"}
    engine.dispose()


def test_a_hold_names_a_consumer_that_there_is(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/inbox.db")
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(CONTRACT)
    with pytest.raises(ConfigurationError, match=r"no consumer 'biling'.*registered: billing"):
        inbox.hold("biling", None, reason="audit", operator="jane")
    assert inbox.hold("billing", None, reason="audit", operator="jane")
    engine.dispose()
