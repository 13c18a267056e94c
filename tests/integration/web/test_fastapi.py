"""The helper for FastAPI, and how little changes when a handler moves over."""

from __future__ import annotations

import asyncio
import difflib
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from onceward import Onceward
from onceward.errors import ConfigurationError
from onceward.outbox import AsyncOutboxSender
from onceward.web.fastapi import AppDatabase
from tests.integration.docs.page import blocks
from tests.support import ROOT

MOST_CHANGES = 10


@pytest.mark.req("IN-15")
def test_a_handler_moves_over_in_at_most_ten_changed_lines() -> None:
    page = (ROOT / "docs" / "how-to" / "fastapi.md").read_text("utf-8")
    files = {block.title: block.text.splitlines() for block in blocks(page)}
    changes = list(difflib.unified_diff(files["before.py"], files["after.py"], n=0, lineterm=""))[2:]
    removed = [line for line in changes if line.startswith("-")]
    added = [line for line in changes if line.startswith("+")]
    assert (len(added), len(removed)) == (4, 2)  # as the page says
    assert len(added) + len(removed) <= MOST_CHANGES


@pytest.mark.req("IN-15")
def test_session_and_outbox_of_a_request_are_one_transaction(tmp_path: Path) -> None:
    shop = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")

    @shop.consumer("redis://x/shipping", contract=None)
    def ship(order: dict[str, Any]) -> None: ...

    db = AppDatabase(shop)
    web = FastAPI(lifespan=db.lifespan)
    Database = Annotated[AsyncSession, Depends(db.session, scope="function")]
    Events = Annotated[AsyncOutboxSender, Depends(db.outbox, scope="function")]

    async def place(id_: int, session: Any, events: Any) -> dict[str, Any]:
        await session.execute(text("CREATE TABLE IF NOT EXISTS orders (id INTEGER)"))
        await session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": id_})
        await events.send(ship, {"id": id_}, id=f"order-{id_}")
        if id_ < 0:
            raise ValueError("no such order")
        return {}

    place.__annotations__ |= {"id_": int, "session": Database, "events": Events, "return": dict}
    web.post("/orders/{id_}")(place)

    async def call() -> list[int]:
        with pytest.raises(ConfigurationError, match="FastAPI\\(lifespan"):
            _ = db.engine
        async with web.router.lifespan_context(web):
            transport = httpx.ASGITransport(web, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return [(await client.post(f"/orders/{number}")).status_code for number in (1, -2)]

    assert asyncio.run(call()) == [200, 500]
    engine = shop.create_engine()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT id FROM orders")).scalars().all() == [1]
        assert connection.execute(text("SELECT message_id FROM onceward_outbox")).scalars().all() == [
            "order-1"
        ]
    engine.dispose()
