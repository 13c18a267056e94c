"""What users get wrong is refused in plain words, before anything is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from onceward import EffectRefused, Transaction
from onceward.errors import ConfigurationError
from onceward.inbox import Contract, EffectError, Inbox

pytestmark = pytest.mark.req("CC-089")

CHARGING = Contract(
    consumer_id="charging",
    event_types=["order"],
    owner_team="shop",
    idempotency_mechanism="the effect's key",
    mode="effectful",
)
ORDER = Transaction(id="o1", payload={}, metadata={"event_type": "order"})


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = create_engine(f"sqlite:///{tmp_path}/shop.db")
    yield made
    made.dispose()


@pytest.fixture
def inbox(engine: Engine) -> Inbox:
    made = Inbox(engine)
    made.migrate()
    made.register(CHARGING)
    return made


def charge(inbox: Inbox, call: Any, **more: Any) -> Any:
    def handle(_: Any, session: Any) -> Any:
        return session.effect("charge", call, **more)

    return inbox.process(CHARGING, ORDER, handle).value


@pytest.mark.parametrize("number", [23, 24.0, 1440, 3599])
def test_a_small_number_may_mean_hours_or_seconds(inbox: Inbox, number: float) -> None:
    expected = rf"key_valid_for={number} does not say .*hours\({number}\), or timedelta\(seconds={number}\)"
    with pytest.raises(ConfigurationError, match=expected):
        charge(inbox, lambda key: key, key_valid_for=number)
    assert inbox.effects(in_doubt=False) == []


@pytest.mark.parametrize(("given", "what"), [({}, "call"), ({"reconcile": "ch_1"}, "reconcile")])
def test_an_effect_is_a_function(inbox: Inbox, given: dict[str, Any], what: str) -> None:
    call: Any = (lambda key: key) if given else {"charge": "ch_1"}
    with pytest.raises(
        EffectError, match=rf"the {what} of effect 'charge' is \w+, not a function.*lambda key:"
    ):
        charge(inbox, call, **given)
    assert inbox.effects(in_doubt=False) == []


def test_a_refusal_without_a_reason_says_so(inbox: Inbox) -> None:
    def refuse(key: str) -> None:
        raise EffectRefused

    with pytest.raises(EffectRefused, match="the provider refused it, and the handler gave no reason"):
        charge(inbox, refuse)
    assert "gave no reason" in str(inbox.effects(in_doubt=False))


def test_a_contract_names_all_that_is_missing_or_unknown() -> None:
    make: Any = Contract
    with pytest.raises(
        ConfigurationError,
        match="the contract of 'b' needs owner_team, idempotency_mechanism, and it has no field owner; write",
    ):
        make(consumer_id="b", event_types=["order"], owner="shop")
