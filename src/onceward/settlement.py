"""What the engine tells a connector about a transaction it fetched."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.task.exceptions import TransactionException


class Verdict(StrEnum):
    DONE = "done"
    """The success handler has ended: acknowledge."""
    FAILED = "failed"
    """The lifecycle ended in failure: the connector's failure rule decides, redelivery or dead letter."""
    RETURNED = "returned"
    """It was not started, or could not be yet: give it to somebody else after `delay`, and do not count this
    delivery."""


class Settlement(msgspec.Struct, frozen=True):
    """The end of one delivery. `transaction` is the very object the connector handed out."""

    transaction: Transaction
    verdict: Verdict
    error: TransactionException | None = None
    delay: float = 0.0
    """Seconds until something returned may be handed out again."""
