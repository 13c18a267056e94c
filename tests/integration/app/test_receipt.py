"""Middleware that returns although the inbox has recorded nothing: the message is not acknowledged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from onceward import AsyncConsumerTask, Contract, Middleware, Onceward, Transaction
from onceward.app.build import open_task, open_task_async
from onceward.inbox.evidence.code_digest import code_of
from onceward.middleware import StepCall, StepInfo
from onceward.task.exceptions import UnrecordedError

pytestmark = pytest.mark.req("CC-101")

CONTRACT = Contract(
    consumer_id="charge", event_types=["*"], owner_team="shop", idempotency_mechanism="one transaction"
)


class Swallows(Middleware):
    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        async def go(*given: Any) -> Any:
            try:
                return await call(*given)
            except Exception:
                return None

        return go if step.name == "process" else call


class Skips(Middleware):
    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        async def go(*given: Any) -> Any:
            return None

        return go if step.name == "process" else call


class Retries(Middleware):
    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        async def go(*given: Any) -> Any:
            try:
                return await call(*given)
            except ConnectionError:
                return await call(*given)

        return go if step.name == "process" else call


class Flaky:
    """Fails once."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == 1:
            raise ConnectionError("down for a moment")


def shop(folder: Path, flaky: Flaky, *middleware: Middleware, asynchronous: bool = False) -> Onceward:
    app = Onceward("shop", database=f"sqlite:///{folder}/shop.db", middleware=middleware)
    source = f"sqlite:///{folder}/orders.db"

    def charge(order: dict[str, Any], session: Any) -> None:
        flaky()

    async def charge_async(order: dict[str, Any], session: Any) -> None:
        flaky()

    app.consumer(source, contract=CONTRACT, name="charge")(charge_async if asynchronous else charge)

    @app.producer(source)
    def place(number: int) -> dict[str, int]:
        return {"number": number}

    app.produce(place, 1)
    return app


@pytest.mark.parametrize("middleware", [Swallows(), Skips()])
def test_what_middleware_swallows_is_not_acknowledged(tmp_path: Path, middleware: Middleware) -> None:
    app = shop(tmp_path, Flaky(), Middleware(), middleware)
    with open_task(app, app.consumers["charge"]) as task:
        report = task.consume_transactions()
        outcome = task.start_processing(Transaction(id="o2", payload={"number": 2}))
    assert (report.succeeded, report.failed) == (0, 1)
    if isinstance(middleware, Skips):
        assert outcome.error is not None
        assert isinstance(outcome.error.__cause__, UnrecordedError)
        assert "In Skips ─► inbox, one caught an error" in str(outcome.error)


def test_nor_in_asyncio(tmp_path: Path) -> None:
    app = shop(tmp_path, Flaky(), Swallows(), asynchronous=True)

    async def run() -> Any:
        async with open_task_async(app, app.consumers["charge"]) as task:
            return await task.consume_transactions()

    report = asyncio.run(run())
    assert (report.succeeded, report.failed) == (0, 1)


def test_middleware_may_call_again_and_sees_duplicates(tmp_path: Path) -> None:
    app = shop(tmp_path, Flaky(), Retries())
    order = Transaction(id="o1", payload={"number": 1})
    with open_task(app, app.consumers["charge"]) as task:
        outcomes = [task.start_processing(order) for _ in range(2)]
    assert [each.duplicate for each in outcomes] == [False, True]
    assert [each.error for each in outcomes] == [None, None]


def test_evidence_covers_the_modules_of_middleware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_audit.py").write_text("from onceward import Middleware\nclass Audit(Middleware): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    from shop_audit import Audit  # type: ignore[import-not-found]

    class Charges(AsyncConsumerTask):
        contract = CONTRACT
        middleware = (Audit(),)

        async def process_transaction(self, transaction: Transaction, session: Any) -> None: ...

    assert "shop_audit" in code_of(Charges, CONTRACT).modules
