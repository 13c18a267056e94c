"""Consumers whose functions are elsewhere: imported, made by a factory, a method."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from onceward import Contract, Onceward
from tests.verification.functions_elsewhere import Shop, make_handler, write_bill

app = Onceward("elsewhere", database="sqlite:///elsewhere.db")


def create_bills(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE bills (id TEXT)")


def consumer(name: str, function: Any) -> None:
    app.consumer(
        f"memory://{name}",
        name=name,
        contract=Contract(
            consumer_id=name, event_types=["placed"], owner_team="x", idempotency_mechanism="one transaction"
        ),
        verification={
            "events": [{"tracking_id": "o1", "event_type": "placed", "payload": {"id": "o1"}}],
            "setup": create_bills,
        },
    )(function)


consumer("imported", write_bill)
consumer("made", make_handler())
consumer("method", Shop().bill)
