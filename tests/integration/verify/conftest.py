"""What all tests of verification share."""

from __future__ import annotations

from importlib import import_module

import pytest

lost_updates = import_module("onceward.verify.scenarios.lost_updates")  # a function has its name, too


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer pairs of events than in a verification of the user, to save time: the likeliest come first."""
    monkeypatch.setattr(lost_updates, "MOST_PAIRS", 2)
    monkeypatch.setattr(lost_updates, "FEW_PAIRS", 1)
