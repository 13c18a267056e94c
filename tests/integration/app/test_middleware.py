"""Middleware of an app: around every consumer and producer, and printed in its order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onceward import Contract, Middleware, Onceward, Transaction
from onceward.app.build import open_task
from onceward.cli.main import app as command
from onceward.middleware import StepCall, StepInfo
from onceward.run.progress import Progress
from onceward.task import plan
from onceward.task.call import Call
from onceward.testing.telemetry import record

CONTRACT = Contract(
    consumer_id="charge",
    event_types=["*"],
    owner_team="shop",
    idempotency_mechanism="the charge and the inbox's record are one transaction",
)


class Seen(Middleware):
    """Records which steps ran."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def wrap_step(self, step: StepInfo, call: StepCall) -> StepCall:
        async def note(transaction: Transaction, *rest: Any) -> Any:
            self.steps.append(step.name)
            return await call(transaction, *rest)

        return note


def shop(folder: Path, seen: Seen, **settings: Any) -> Onceward:
    app = Onceward("shop", database=f"sqlite:///{folder}/shop.db", middleware=[seen], **settings)

    @app.consumer(f"sqlite:///{folder}/orders.db", contract=CONTRACT)
    def charge(order: dict[str, Any], session: Any) -> None: ...

    @app.producer(charge)
    def place(number: int) -> dict[str, int]:
        return {"number": number}

    return app


@pytest.mark.req("MW-01")
def test_it_is_around_consumers_and_producers(tmp_path: Path) -> None:
    seen = Seen()
    app = shop(tmp_path, seen)
    app.produce(app.producers["place"].function, 1)
    with open_task(app, app.consumers["charge"]) as task:
        assert task.consume_transactions().succeeded == 1
    assert [step for step in seen.steps if step in ("produce", "process")] == ["produce", "process"]


@pytest.mark.req("MW-02")
@pytest.mark.parametrize("guard", ["off", "raise"])
def test_explain_prints_the_middleware_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guard: str
) -> None:
    (tmp_path / f"shop_guard_{guard}.py").write_text(
        "from pathlib import Path\n"
        "from tests.integration.app.test_middleware import Seen, shop\n"
        f"app = shop(Path({str(tmp_path)!r}), Seen(), engine={{'io_guard': {guard!r}}})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    target = f"shop_guard_{guard}:app"
    printed = CliRunner().invoke(command, ["explain", target, "--verbose", "--json"])
    shown = CliRunner().invoke(command, ["explain", target, "-v"], env={"COLUMNS": "200"})
    assert (printed.exit_code, shown.exit_code) == (0, 0)
    names = json.loads(printed.stdout)[0]["middleware"]
    assert "Seen" in names
    places = [shown.stdout.index(f"\n{name}  ") for name in names]
    assert places == sorted(places)
    assert "Records which steps ran." in shown.stdout

    app = shop(tmp_path, Seen(), engine={"io_guard": guard})
    with record(), open_task(app, app.consumers["charge"], Progress(lambda: None)) as task:
        wiring = plan.consumer(task, None)
        watch = Call(task, wiring).watch
        assert watch is not None
        assert names == [watch.name, *(each.name for each in wiring.chain)]


def test_without_verbose_nothing_is_said_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_without.py").write_text(
        "from onceward import Onceward\napp = Onceward('shop')\n"
        "@app.consumer('memory://orders')\ndef charge(order: dict): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    printed = CliRunner().invoke(command, ["explain", "shop_without:app", "--json"])
    assert "middleware" not in json.loads(printed.stdout)[0]
