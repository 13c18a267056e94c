"""The order desk: a process that places orders, each with its message in one transaction, until all are placed.

Two threads place orders of different customers at once, so transactions commit out of order. Sometimes one changes
its mind and rolls back what it wrote and sent. Killed and started again, it goes on after the last that committed.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import services
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

THREADS = 2
CHANGED_MINDS = 0.1
LAST = "SELECT coalesce(max(number), 0) FROM orders WHERE customer = :customer"


class ChangedMindError(Exception):
    pass


def place(engine: Engine, order: dict[str, Any], *, changes_mind: bool) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO orders (customer, number) VALUES (:customer, :number)"),
            {"customer": order["customer"], "number": order["number"]},
        )
        outbox = services.orders.outbox(connection)
        headers = services.describe(order, "placed")
        outbox.send(services.address("CHARGE"), order, key=order["customer"], headers=headers)
        outbox.send(services.address("FEED"), services.tell(order, "placed"), key=order["customer"])
        if changes_mind:
            raise ChangedMindError


def serve(engine: Engine, customers: list[str], each: int, pause: float) -> None:
    chance = random.Random()
    while True:
        try:
            with engine.connect() as connection:
                last = {
                    one: connection.execute(text(LAST), {"customer": one}).scalar_one() for one in customers
                }
            for _ in range(each):
                for one in customers:
                    if last[one] == each:
                        continue
                    time.sleep(pause)
                    if chance.random() < CHANGED_MINDS:
                        order = {"customer": one, "number": last[one] + 1, "phantom": True}
                        with suppress(ChangedMindError):
                            place(engine, order, changes_mind=True)
                    place(engine, {"customer": one, "number": last[one] + 1}, changes_mind=False)
                    last[one] += 1
            return
        except OperationalError as error:  # the database is away: what committed is looked up again
            print(f"the desk waits: {error}", file=sys.stderr, flush=True)
            time.sleep(0.3)


def main() -> None:
    customers, each, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    engine = services.orders.create_engine()
    names = [f"customer-{number}" for number in range(customers)]
    threads = [
        threading.Thread(target=serve, args=(engine, names[number::THREADS], each, pause))
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
