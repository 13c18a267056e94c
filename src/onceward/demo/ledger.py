"""Where orders take effect: shipments and stock, in the database that also has the inbox and the dead letters.

Nothing here prevents an order from being shipped twice. The inbox does, and the balance would show it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event

from onceward import Contract, Inbox
from onceward.demo import journal
from onceward.demo.orders import ARTICLES

SCHEMA = """
CREATE TABLE shipments (id TEXT NOT NULL, article TEXT NOT NULL, pieces INTEGER NOT NULL, packed_by TEXT NOT NULL);
CREATE TABLE stock (article TEXT PRIMARY KEY NOT NULL, shipped INTEGER NOT NULL DEFAULT 0);
"""


def create(path: Path, contract: Contract) -> None:
    """Create the ledger with its articles, and the inbox with its consumer."""
    journal.create(path, SCHEMA)
    with journal.writing(path) as ledger:
        ledger.executemany("INSERT INTO stock (article) VALUES (?)", [(article,) for article in ARTICLES])
    engine = open_engine(path)
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(contract)
    engine.dispose()


def open_engine(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": journal.PATIENCE})
    # Commits survive a kill; surviving a power cut too would cost a disk flush for every order.
    event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = NORMAL").close())
    return engine


def add_article(path: Path, article: str) -> None:
    with journal.writing(path) as ledger:
        ledger.execute("INSERT INTO stock (article) VALUES (?)", (article,))


class LedgerReader:
    """Reads the ledger without blocking writers."""

    def __init__(self, path: Path) -> None:
        self._ledger = journal.reader(path)

    def count(self) -> int:
        """How many orders have taken effect."""
        return int(self._rows("SELECT count(DISTINCT id) FROM shipments")[0][0])

    def effects(self) -> Counter[str]:
        """How often each order was shipped."""
        return Counter(dict(self._rows("SELECT id, count(*) FROM shipments GROUP BY id")))

    def packed_by(self, process: str) -> set[str]:
        """The orders that this process shipped."""
        return {order for (order,) in self._rows("SELECT id FROM shipments WHERE packed_by = ?", process)}

    def shares(self) -> dict[str, int]:
        """Shipments by process."""
        return dict(
            self._rows("SELECT packed_by, count(*) FROM shipments GROUP BY packed_by ORDER BY packed_by")
        )

    def stock(self) -> dict[str, int]:
        """Pieces shipped, by article."""
        return dict(self._rows("SELECT article, shipped FROM stock"))

    def letters(self, status: str) -> int:
        """How many dead letters have this status."""
        found = self._rows("SELECT count(*) FROM onceward_dead_letters WHERE status = ?", status)
        return int(found[0][0])

    def close(self) -> None:
        self._ledger.close()

    def _rows(self, query: str, *values: str) -> list[Any]:
        return self._ledger.execute(query, values).fetchall()
