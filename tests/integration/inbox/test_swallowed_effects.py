"""A handler that catches the failure of an effect and returns: the attempt fails, and the event is not done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import EffectRefused, Transaction
from onceward.inbox import AsyncInbox, Contract, EffectError, Inbox, Result

pytestmark = pytest.mark.req("CC-100")

MAIL = Transaction(id="m1", payload={}, metadata={"event_type": "mail"})


def contract(mode: Any = "effectful") -> Contract:
    return Contract(
        consumer_id="mail",
        event_types=["mail"],
        owner_team="shop",
        idempotency_mechanism="the effect's key",
        mode=mode,
    )


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = create_engine(f"sqlite:///{tmp_path}/shop.db")
    yield made
    made.dispose()


@pytest.fixture
def inbox(engine: Engine) -> Inbox:
    made = Inbox(engine)
    made.migrate()
    made.register(contract())
    return made


def raising(error: BaseException) -> Callable[[str], Any]:
    def call(key: str) -> Any:
        raise error

    return call


def swallow(call: Any, name: Any = "mail") -> Callable[[Any, Any], Any]:
    def handle(_: Any, session: Any) -> Any:
        try:
            return session.effect(name, call)
        except Exception:
            return "caught"

    return handle


@pytest.mark.parametrize(
    "error", [ConnectionError("down"), TimeoutError(), OSError(5, "x"), ValueError("bad")]
)
def test_the_event_is_not_done_and_the_next_attempt_calls_the_effect_again(
    inbox: Inbox, error: BaseException
) -> None:
    with pytest.raises(
        EffectError, match=r"effect 'mail' of event m1 failed, .* raise EffectRefused"
    ) as caught:
        inbox.process(contract(), MAIL, swallow(raising(error)))
    assert caught.value.__cause__ is error
    assert [row["state"] for row in inbox.effects(in_doubt=False)] == ["intended"]
    keys: list[str] = []
    assert inbox.process(contract(), MAIL, swallow(keys.append)).done
    assert len(keys) == 1


@pytest.mark.parametrize("name", ["", ["not", "a", "name"]])
def test_an_effect_that_was_never_begun_counts_as_well(inbox: Inbox, name: Any) -> None:
    with pytest.raises(EffectError, match="needs a name of 1 to 200 characters"):
        inbox.process(contract(), MAIL, swallow(lambda key: key, name))


def test_so_does_one_where_none_is_allowed(inbox: Inbox) -> None:
    with pytest.raises(EffectError, match="mode='transactional'"):
        inbox.process(contract("transactional"), MAIL, swallow(lambda key: key))


def test_a_refusal_may_be_caught(inbox: Inbox) -> None:
    assert inbox.process(contract(), MAIL, swallow(raising(EffectRefused("no")))).value == "caught"


def test_another_error_of_the_handler_is_the_failure(inbox: Inbox) -> None:
    def handle(_: Any, session: Any) -> None:
        try:
            session.effect("mail", raising(ConnectionError()))
        except ConnectionError as error:
            raise RuntimeError("later") from error

    with pytest.raises(RuntimeError, match="later"):
        inbox.process(contract(), MAIL, handle)


def test_the_handler_has_to_wait_for_its_effects(inbox: Inbox) -> None:
    inside, go_on = threading.Event(), threading.Event()
    others: list[threading.Thread] = []

    def call(key: str) -> None:
        inside.set()
        go_on.wait(30)

    def handle(_: Any, session: Any) -> None:
        others.append(threading.Thread(target=swallow(call), args=(_, session)))
        others[0].start()
        inside.wait(30)

    try:
        with pytest.raises(EffectError, match="still running when the handler returned"):
            inbox.process(contract(), MAIL, handle)
    finally:
        go_on.set()
        others[0].join()


def test_a_time_limit_of_the_handlers_own_in_asyncio(tmp_path: Path) -> None:
    async def handle(_: Any, session: Any) -> None:
        async def call(key: str) -> None:
            await asyncio.sleep(60)

        try:
            await asyncio.wait_for(session.effect("mail", call), 0.05)
        except TimeoutError:
            return

    async def run() -> Result:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
        try:
            inbox = AsyncInbox(engine)
            await inbox.migrate()
            await inbox.register(contract())
            return await inbox.process(contract(), MAIL, handle)
        finally:
            await engine.dispose()

    with pytest.raises(EffectError, match=r"failed, .* CancelledError"):
        asyncio.run(run())
