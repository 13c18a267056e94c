"""A contract that is whole, for tests of one part of it."""

from __future__ import annotations

from typing import Any

import pytest

from onceward.errors import ConfigurationError
from onceward.inbox.contract import Contract


def contract(**changes: Any) -> Contract:
    fields = {
        "consumer_id": "billing",
        "event_types": ["paid"],
        "owner_team": "money",
        "idempotency_mechanism": "dedup record and invoice in one transaction",
    }
    return Contract(**{**fields, **changes})


def refusal(**changes: Any) -> str:
    """The error for such a contract."""
    with pytest.raises(ConfigurationError) as caught:
        contract(**changes)
    return str(caught.value)
