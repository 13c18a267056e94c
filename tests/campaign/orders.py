"""The orders of a campaign: most are innocent, some are refused, and a few kill their process."""

from __future__ import annotations

import random
import uuid
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from onceward.transaction import Transaction

Fate = Literal["innocent", "refused", "killer"]


class Order(NamedTuple):
    number: str
    fate: Fate
    messages: tuple[Transaction, ...]
    """The message and its copies, which arrive with another time and in another spelling of the same id."""


def make_orders(count: int, chance: random.Random) -> list[Order]:
    killers = set(chance.sample(range(count), 2 if count >= 500 else 0))
    return [_order(number, "killer" if number in killers else None, chance) for number in range(count)]


def _order(number: int, fate: Fate | None, chance: random.Random) -> Order:
    fate = fate or ("refused" if chance.random() < 0.01 else "innocent")
    payload = {"number": f"order-{number}", "fails": fate == "refused", "kills": fate == "killer"}
    spellings = _spellings(number, chance)
    copies = 1 + (chance.random() < 0.15)
    now = datetime.now(UTC)
    messages = tuple(
        Transaction(
            id=spellings[min(each, len(spellings) - 1)],
            payload=payload,
            metadata={"event_type": "order-placed"},
            created_at=now - timedelta(days=each),
        )
        for each in range(copies)
    )
    return Order(payload["number"], fate, messages)


def _spellings(number: int, chance: random.Random) -> list[str]:
    """An id as producers choose it: a UUID of one kind or another, written in two ways, or any text."""
    kind = number % 3
    if kind == 0:
        return [f"invoice {number}"]
    if kind == 1:
        text = str(uuid.UUID(int=chance.getrandbits(128), version=4))
        return [text, text.upper()]
    text = Transaction().id
    return [text, str(uuid.UUID(text))]
