"""An event inside the session of an effectful one, which opens its transaction only when it is used."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.inbox import AsyncInbox, Event, Inbox
from onceward.testing.inbox.effects import effectful
from onceward.testing.inbox.samples import contract, event


@pytest.mark.req("CC-012")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_event_joins_the_session_of_an_effectful_one(tmp_path: Path, asynchronous: bool) -> None:
    url = f"{tmp_path / 'shop.db'}"
    engine = create_engine(f"sqlite:///{url}")
    inbox = Inbox(engine)
    inbox.migrate()
    for each in (effectful(), contract("inner")):
        inbox.register(each)
    if asynchronous:
        asyncio.run(join_async(url))
    else:
        join(inbox)
    for each, name in ((effectful(), "outer"), (contract("inner"), "inner")):
        assert inbox.process(each, event(name), lambda *_: None).duplicate
    engine.dispose()


def join(inbox: Inbox) -> None:
    def outer(_: Event, session: Any) -> None:
        inbox.process(contract("inner"), event("inner"), lambda *_: None, session=session)

    inbox.process(effectful(), event("outer"), outer)


async def join_async(path: str) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    inbox = AsyncInbox(engine)

    async def inner(_: Event, session: Any) -> None: ...
    async def outer(_: Event, session: Any) -> None:
        await inbox.process(contract("inner"), event("inner"), inner, session=session)

    await inbox.process(effectful(), event("outer"), outer)
    await engine.dispose()
