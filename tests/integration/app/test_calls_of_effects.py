"""The call of an effect cannot use the session of its handler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from onceward import Onceward
from onceward.inbox import AsyncInboxSession, InboxSession
from tests.support.orm_shop import Customer, OrmShop, contract, order

ADD = "INSERT INTO customers (name) VALUES ('ann')"
BLOCKING: dict[str, Any] = {
    "session": lambda db, inbox: inbox.execute(ADD),
    "read": lambda db, inbox: inbox.fetch_all("SELECT 1 AS one"),
    "send": lambda db, inbox: inbox.send("sqlite:///never-opened.db", {}),
    "orm": lambda db, inbox: db.execute(text(ADD)),
    "objects": lambda db, inbox: db.add(Customer(name="ann")),
}
ONCE = {"steps": {"process": {"retry": {"max_attempts": 1}}}}


async def in_asyncio(use: Any, db: Any, inbox: Any) -> None:
    used = use(db, inbox)
    if used is not None:
        await used


@pytest.mark.req("IN-05")
@pytest.mark.parametrize("how", BLOCKING)
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_the_call_of_an_effect_cannot_use_the_session(how: str, mode: str, tmp_path: Path) -> None:
    shop = OrmShop(f"sqlite:///{tmp_path}/shop.db", asynchronous=mode == "asyncio")
    app = Onceward("shop", database=shop.url)
    given: dict[str, Any] = {"contract": contract(mode="effectful"), "policy": ONCE, "name": "take"}
    called: list[str] = []
    if mode == "asyncio":

        @app.consumer("memory://calls", **given)
        async def take_async(payload: dict[str, Any], db: AsyncSession, inbox: AsyncInboxSession) -> None:
            async def pay(key: str) -> str:
                called.append(key)
                if len(called) < 3:
                    await asyncio.create_task(in_asyncio(BLOCKING[how], db, inbox))
                return "paid"

            await inbox.effect("pay", pay)
            await inbox.execute(ADD)
    else:

        @app.consumer("memory://calls", **given)
        def take(payload: dict[str, Any], db: Session, inbox: InboxSession) -> None:
            def pay(key: str) -> str:
                called.append(key)
                if len(called) < 3:
                    BLOCKING[how](db, inbox)
                return "paid"

            inbox.effect("pay", pay)
            inbox.execute(ADD)

    *refused, done = shop.process(app, *[order(1)] * 3)
    for each in refused:
        assert "the session cannot be used inside the call of an effect" in str(each.error)
    assert done.error is None
    assert len(set(called)) == 1  # the key of an effect in doubt
    assert shop.rows("SELECT name FROM customers") == [("ann",)]
    shop.engine.dispose()
