"""A consumer with order in a process that a test kills: `python -m tests.crash.order.worker DB SOURCE LOG`.

Its handler writes a line to the log when it begins and when it ends.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from onceward import Contract, Onceward
from onceward.app.build import open_task

SLOTS = 16


def main(database: str, source: str, log: str) -> None:
    app = Onceward("shop", database=database)
    lines = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    contract = Contract(
        consumer_id="billing", event_types=["*"], owner_team="tests", idempotency_mechanism="row", lease=2.0
    )
    policy = {
        "loop": {
            "streaming": True, "mode": "continuous", "batch": {"size": 50}, "concurrency": {"value": SLOTS},
        }
    }  # fmt: skip

    def is_first_try(order: dict[str, Any]) -> bool:
        try:
            os.close(os.open(f"{log}-{order['customer']}-{order['number']}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    @app.consumer(source, contract=contract, policy=policy, order_by="customer")
    def charge(order: dict[str, Any], session: Any) -> None:
        what = f"{order['customer']} {order['number']} {os.getpid()}"
        os.write(lines, f"begin {what} {time.monotonic_ns()}\n".encode())
        if order["number"] % 7 == 3 and is_first_try(order):
            os.write(lines, f"end {what} {time.monotonic_ns()}\n".encode())
            raise RuntimeError("it fails once")
        time.sleep(0.002)  # so kills find some at work
        session.execute(
            "INSERT INTO charges (customer, number) VALUES (:customer, :number)",
            {"customer": order["customer"], "number": order["number"]},
        )
        os.write(lines, f"end {what} {time.monotonic_ns()}\n".encode())

    with open_task(app, app.consumers["charge"]) as task:
        task.consume_transactions(app.consumers["charge"].policy)


if __name__ == "__main__":
    main(*sys.argv[1:])
