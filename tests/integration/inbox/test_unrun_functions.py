"""Handlers, effects and reconcile hooks whose code does not run when they are called: nothing is recorded as done."""

from __future__ import annotations

import functools
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from onceward.errors import ConfigurationError
from onceward.inbox import AsyncInbox, Event, Inbox
from tests.support.inbox.contracts import contract

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

UNRUN = "so its code has not run"
EVENT = {"tracking_id": "e1", "event_type": "paid", "created_at": "2026-03-01T00:00:00Z", "payload": 3}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # such as "coroutine was never awaited"
        yield


async def coroutine(*_: Any) -> None: ...


def yielding(*_: Any) -> Iterator[None]:
    yield


async def yielding_async(*_: Any) -> AsyncIterator[None]:
    yield


class World:
    """An inbox on SQLite in one of the modes, with blocking calls."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.asynchronous = database.asynchronous
        self.inbox: Any = (AsyncInbox if database.asynchronous else Inbox)(database.default)
        self.contract = contract(mode="effectful")
        self.run(self.inbox.migrate)
        self.run(self.inbox.register, self.contract)

    def run(self, call: Any, *args: Any) -> Any:
        return self.database.run(call(*args)) if self.asynchronous else call(*args)

    def process(self, handler: Any) -> Any:
        return self.run(self.inbox.process, self.contract, Event.of(EVENT), handler)

    def hidden(self, make: Any) -> Any:
        """A function that looks right, and returns what has not run."""

        def plain(*_: Any) -> Any:
            return make()

        async def asynchronous(*_: Any) -> Any:
            return make()

        return asynchronous if self.asynchronous else plain

    def with_effect(self, call: Any, **more: Any) -> Any:
        def handle(event: Event, session: Any) -> Any:
            return session.effect("charge", call, **more)

        async def handle_async(event: Event, session: Any) -> Any:
            return await session.effect("charge", call, **more)

        return handle_async if self.asynchronous else handle

    def in_doubt(self) -> int:
        return len(self.run(self.inbox.effects))


@pytest.fixture
def world(sqlite: Database) -> World:
    return World(sqlite)


@pytest.mark.parametrize("handler", [yielding, yielding_async, functools.partial(yielding, 1)])
def test_a_handler_that_yields_is_refused_before_anything_is_recorded(world: World, handler: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"the handler yielding.* has a `yield`"):
        world.process(handler)
    assert world.process(world.hidden(lambda: 7)).value == 7


@pytest.mark.parametrize("make", [coroutine, yielding, yielding_async])
def test_an_event_is_not_done_by_a_handler_that_has_not_run(world: World, make: Any) -> None:
    with pytest.raises(TypeError, match=UNRUN):
        world.process(world.hidden(make))
    assert world.process(world.hidden(lambda: 7)).value == 7


@pytest.mark.parametrize("call", [yielding, yielding_async])
def test_an_effect_that_cannot_run_is_refused_and_not_in_doubt(world: World, call: Any) -> None:
    for handler in (world.with_effect(call), world.with_effect(world.hidden(lambda: 1), reconcile=call)):
        with pytest.raises(ConfigurationError, match=r"of effect 'charge' has a `yield`"):
            world.process(handler)
    assert world.in_doubt() == 0


@pytest.mark.parametrize("make", [coroutine, yielding, yielding_async])
def test_an_effect_that_has_not_run_is_not_settled(world: World, make: Any) -> None:
    with pytest.raises(TypeError, match=UNRUN):
        world.process(world.with_effect(world.hidden(make)))
    assert world.in_doubt() == 1
    with pytest.raises(TypeError, match=UNRUN):
        world.process(world.with_effect(world.hidden(lambda: 1), reconcile=world.hidden(make)))
    assert world.in_doubt() == 1
