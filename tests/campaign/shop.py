"""The app under attack: `charge` writes through its session, `ship` calls a provider that honors keys.

No table has a unique key, so an order that is done twice has two rows. What an order's payload asks for:
`fails`: it is refused. `kills`: it kills its own process every time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from contextlib import closing
from typing import Any

from onceward import Contract, ExceptionCategory, Onceward, TransactionException

MODE = os.environ.get("CAMPAIGN_MODE", "threads")
LEASE = 3
SECONDS = 0.01
"""That a handler takes, so kills hit it in the middle."""
POLICY = {"loop": {"concurrency": {"value": 8}}}
app = Onceward("campaign", database=os.environ.get("CAMPAIGN_DATABASE", "sqlite:///inbox.db"))


def source(name: str) -> str:
    return os.environ.get("CAMPAIGN_SOURCE", "sqlite:///{}.db?lease=3").format(name)


def contract(name: str, mode: Any) -> Contract:
    return Contract(
        consumer_id=name,
        event_types=["order-placed"],
        owner_team="campaign",
        idempotency_mechanism="the row and the inbox's record are one transaction; the provider honors keys",
        mode=mode,
        lease=LEASE,
    )


def examine(order: dict[str, Any]) -> None:
    if order.get("fails"):
        raise TransactionException("refused, as it was asked", category=ExceptionCategory.BUSINESS)
    if order.get("kills"):
        os.kill(os.getpid(), signal.SIGKILL)


def ask_provider(key: str, number: str) -> str:
    """What a payment provider does: the first call under a key counts, a repetition gets the same answer."""
    with closing(sqlite3.connect("provider.db", timeout=60, isolation_level=None)) as connection:
        connection.execute("INSERT OR IGNORE INTO shipments VALUES (?, ?)", (key, number))
    return f"shipment of {number}"


CHARGE = "INSERT INTO charges VALUES (:number)"

if MODE == "asyncio":

    @app.consumer(source("charge"), contract=contract("charge", "transactional"), policy=POLICY)
    async def charge(order: dict, session: Any) -> None:  # type: ignore[type-arg]
        examine(order)
        await session.execute(CHARGE, {"number": order["number"]})
        await asyncio.sleep(SECONDS)

    @app.consumer(source("ship"), contract=contract("ship", "effectful"), policy=POLICY)
    async def ship(order: dict, session: Any) -> None:  # type: ignore[type-arg]
        examine(order)

        async def call(key: str) -> str:
            answer = await asyncio.to_thread(ask_provider, key, order["number"])
            await asyncio.sleep(SECONDS)
            return answer

        await session.effect("ship", call)

else:

    @app.consumer(source("charge"), contract=contract("charge", "transactional"), policy=POLICY)
    def charge(order: dict, session: Any) -> None:  # type: ignore[type-arg]
        examine(order)
        session.execute(CHARGE, {"number": order["number"]})
        time.sleep(SECONDS)

    @app.consumer(source("ship"), contract=contract("ship", "effectful"), policy=POLICY)
    def ship(order: dict, session: Any) -> None:  # type: ignore[type-arg]
        examine(order)

        def call(key: str) -> str:
            answer = ask_provider(key, order["number"])
            time.sleep(SECONDS)
            return answer

        session.effect("ship", call)
