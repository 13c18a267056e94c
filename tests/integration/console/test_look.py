"""Words and units of the console's pages."""

from __future__ import annotations

from typing import Any

import pytest

from onceward import Onceward
from onceward.console.backstage import Backstage
from onceward.console.look import details, in_contract, in_policy, rate
from onceward.console.overview import state_of


@pytest.mark.req("UI-25")
@pytest.mark.parametrize(
    ("stage", "pid", "state"),
    [("running", None, "restarting"), ("draining", None, "not running"), ("running", 7, "not running")],
)
def test_a_consumer_whose_worker_is_started_again_is_restarting(
    stage: str, pid: int | None, state: str
) -> None:
    app = Onceward("shop")
    app.consumer("sqlite:///orders.db", name="charge")(lambda order: None)
    backstage = Backstage(app, state=dict)
    worker = {"worker": 1, "pid": pid, "consumers": [], "earlier": {"charge": {"succeeded": 1, "failed": 0}}}
    backstage.states = [{"stage": stage, "workers": [worker]}]
    assert state_of(backstage, "charge", backstage.status("charge")) == state


@pytest.mark.req("UI-25")
@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("lease", 5, "5 s"),
        ("gap_timeout", 300, "5 min"),
        ("tolerates", None, "–"),
        ("event_types", ["paid", "sent"], "paid, sent"),
        ("event_types", [], "–"),
        ("replay_days", 0, "0"),
        ("owner_team", "money", "money"),
    ],
)
def test_a_contract_has_units(name: str, value: Any, shown: str) -> None:
    assert in_contract(value, name) == shown


@pytest.mark.req("UI-25")
@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("policy.steps.process.retry.timeout", 1.0, "1 s"),
        ("policy.loop.empty_queue.backoff_cap", 0.5, "0.5 s"),
        ("policy.loop.timeout", None, "None"),
        ("policy.loop.batch.size", 100, "100"),
        ("source", "memory://a", "memory://a"),
    ],
)
def test_a_policy_has_units(name: str, value: Any, shown: str) -> None:
    assert in_policy(value, name) == shown


@pytest.mark.req("UI-25")
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "unknown"),
        (0, "0/s"),
        (0.01, "under 0.1/s"),
        (0.05, "0.1/s"),
        (12.34, "12.3/s"),
        (1234.5, "1,234/s"),
    ],
)
def test_a_rate_that_is_not_zero_is_not_shown_as_zero(value: float | None, shown: str) -> None:
    assert rate(value) == shown


@pytest.mark.req("UI-25")
def test_an_entry_of_the_audit_is_words_with_a_time() -> None:
    entry = {
        "filter": {"consumer": "billing", "until": 1794961016.02},
        "letters": 9990,
        "fix_ref": "release 2",
    }
    assert details(entry) == (
        "filter: consumer billing, until 2026-11-18 00:16:56 UTC · letters: 9,990 · fix ref: release 2"
    )
