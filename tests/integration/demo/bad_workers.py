"""Demo workers that are each wrong in one way: `python bad_workers.py WHICH SETUP URL NAME`."""

from __future__ import annotations

import sys
from typing import Any

from onceward.demo import worker
from onceward.demo.tasks import ShipOrder
from onceward.transaction import Transaction

LOST, DOUBLED = "order-000007", "order-000011"


def careless(*arguments: str) -> None:
    """Acknowledges one order without shipping it, and ships another one twice."""
    ship = ShipOrder.process_transaction

    def ship_carelessly(self: ShipOrder, transaction: Transaction, session: Any) -> None:
        for _ in range({LOST: 0, DOUBLED: 2}.get(transaction.id, 1)):
            ship(self, transaction, session)

    ShipOrder.process_transaction = ship_carelessly  # type: ignore[method-assign]
    worker.main(*arguments)


def broken(*arguments: str) -> None:
    """Cannot even start."""
    raise RuntimeError("no coffee")


if __name__ == "__main__":
    which, *rest = sys.argv[1:]
    globals()[which](*rest)
