"""The app of `test_shutdown`, copied into its own directory: two consumers, one of each mode.

A message is a row in `effects`, written through the session, and a line in calls.txt, which no transaction covers.
RUN_SOURCES has the URLs of the two sources.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from onceward import Onceward
from onceward.inbox import Contract

app = Onceward("site", database="sqlite:///site.db")
CHARGES, MAILS = os.environ["RUN_SOURCES"].split()
POLICY = {
    "loop": {
        "concurrency": {"value": 4},
        "batch": {"size": 8},  # more than run at once, so there is always something to return
        "empty_queue": {"backoff": 0.02, "backoff_cap": 0.1},
    }
}
INSERT = "INSERT INTO effects VALUES (:consumer, :number)"


def contract(name: str) -> Contract:
    return Contract(
        consumer_id=name,
        event_types=["*"],
        owner_team="tests",
        idempotency_mechanism="inbox row beside the effect",
    )


def note(consumer: str, order: dict[str, Any]) -> dict[str, Any]:
    with Path("calls.txt").open("a") as lines:
        lines.write(f"{consumer}-{order['number']}\n")
    return {"consumer": consumer, "number": order["number"]}


@app.consumer(CHARGES, contract=contract("charge"), policy=POLICY)
def charge(order: dict, session: Any) -> None:  # type: ignore[type-arg]
    row = note("charge", order)
    time.sleep(order["seconds"])
    session.execute(INSERT, row)


@app.consumer(MAILS, contract=contract("mail"), policy=POLICY)
async def mail(order: dict, session: Any) -> None:  # type: ignore[type-arg]
    row = note("mail", order)
    await asyncio.sleep(order["seconds"])
    await session.execute(INSERT, row)
