"""A target in the memory of a process: the relay has another memory, so it must not count as published."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import text

from onceward import Onceward, testing
from onceward.app.relay import OutboxAddress
from onceward.errors import ConfigurationError
from onceward.outbox import OutboxError
from onceward.run.run import check
from tests.support.orm_shop import contract
from tests.support.outbox import OutboxWorld, outbox, turn

__all__ = ["outbox"]


@pytest.mark.req("OB-30")
@pytest.mark.parametrize("kind", ["consumer", "producer"])
def test_a_function_whose_messages_stay_in_memory_is_refused_at_the_call(
    outbox: OutboxWorld, kind: str
) -> None:
    def ship(order: Any) -> Any: ...

    getattr(outbox.app, kind)("memory://ship")(ship)
    with pytest.raises(OutboxError, match=r"nothing was sent.*memory://ship.*another process"):
        outbox.send(1, target=ship)  # type: ignore[arg-type]
    assert outbox.rows() == []


@pytest.mark.req("OB-30")
def test_a_message_for_memory_that_is_in_the_table_waits(
    outbox: OutboxWorld, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.send(1)
    with outbox.engine.begin() as connection:
        connection.execute(text("UPDATE onceward_outbox SET target = 'memory://ship'"))
    with closing(OutboxAddress(outbox.app, in_place=True).open(asynchronous=False)) as relay:
        turn(relay)
    assert outbox.rows() == ["ready"]
    assert "memory://ship cannot be reached; its messages wait in the outbox" in caplog.text


@pytest.mark.req("OB-30")
@pytest.mark.parametrize("only", [(), ("outbox-relay",)])
def test_a_run_refuses_a_schedule_for_memory(outbox: OutboxWorld, only: tuple[str, ...]) -> None:
    outbox.app.consumer("sqlite:///orders.db", contract=None, name="charge")(lambda order: None)

    @outbox.app.every("1m")
    @outbox.app.producer("memory://reports")
    def report() -> int:
        return 1

    with pytest.raises(
        ConfigurationError, match=r"the schedule 'report' \(every 1m\): sink 'memory://reports'"
    ):
        check(outbox.app, only)


@pytest.mark.req("OB-30")
def test_under_test_everything_is_in_one_process() -> None:
    app = Onceward("shop", database="sqlite:///nowhere.db")
    seen: list[Any] = []

    @app.every("1m")
    @app.consumer("memory://ship", contract=None)
    def ship(order: Any) -> None:
        seen.append(order)

    @app.consumer("memory://orders", contract=contract())
    def charge(order: Any, session: Any) -> None:
        session.send(ship, order)
        session.send("memory://ship", order)

    with testing.app(app) as t:
        t.send(charge, {"id": 1})
        t.drain()
        assert seen == [{"id": 1}] * 2
        t.advance("1m")
        assert len(seen) == 3
