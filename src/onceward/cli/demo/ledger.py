"""Where orders take effect.

A queue can only promise to deliver at least once. That an order takes effect once is the ledger's doing: it
writes down the order's id and its effect in one transaction, so an id that is there has had its effect.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from onceward.cli.demo import files
from onceward.cli.demo.orders import Order

SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY NOT NULL, cents INTEGER NOT NULL, message INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY NOT NULL, cents INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS recognised (id TEXT NOT NULL, message INTEGER NOT NULL, redelivery INTEGER NOT NULL);
"""


class Ledger:
    """A service for tasks. Safe for any number of threads and processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        files.create(path, SCHEMA)

    def apply(self, order: Order, message: int) -> bool:
        """Charge the order to its account. False: it was charged before, and nothing is done."""
        with files.writing(self._path) as ledger:
            if not self._is_new(ledger, order, message):
                return False
            ledger.execute(
                "INSERT INTO accounts VALUES (:account, :cents) "
                "ON CONFLICT (name) DO UPDATE SET cents = cents + :cents",
                {"account": order.account, "cents": order.cents},
            )
            return True

    def _is_new(self, ledger: sqlite3.Connection, order: Order, message: int) -> bool:
        written = ledger.execute(
            "INSERT INTO orders VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING",
            (order.id, order.cents, message),
        )
        if written.rowcount == 1:
            return True
        ledger.execute(
            "INSERT INTO recognised SELECT id, :message, message = :message FROM orders WHERE id = :id",
            {"id": order.id, "message": message},
        )
        return False


class LedgerReader:
    """What the ledger says, without holding anybody up."""

    def __init__(self, path: Path) -> None:
        files.create(path, SCHEMA)
        self._ledger = files.reader(path)

    def count(self) -> int:
        """Orders that have taken effect."""
        return self._number("SELECT count(*) FROM orders")

    def duplicates(self) -> int:
        """Copies of orders that were seen and left out."""
        return self._number("SELECT count(DISTINCT message) FROM recognised WHERE NOT redelivery")

    def redeliveries(self) -> int:
        """How often a message was left out because it had been dealt with in an earlier delivery."""
        return self._number("SELECT count(*) FROM recognised") - self.duplicates()

    def ids(self) -> set[str]:
        return {order for (order,) in self._ledger.execute("SELECT id FROM orders")}

    def messages(self) -> set[int]:
        """The numbers of the messages that have taken effect."""
        return {message for (message,) in self._ledger.execute("SELECT message FROM orders")}

    def accounts(self) -> dict[str, int]:
        """Cents by account."""
        return dict(self._ledger.execute("SELECT name, cents FROM accounts"))

    def close(self) -> None:
        self._ledger.close()

    def _number(self, query: str) -> int:
        number: int = self._ledger.execute(query).fetchone()[0]
        return number
