"""onceward: take messages from anywhere and have each effect once in the end."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onceward.telemetry import logs

if TYPE_CHECKING:
    from onceward.app import Onceward
    from onceward.task.mixins.consumer import AsyncConsumerTask, ConsumerTask
    from onceward.task.mixins.producer import AsyncHybridTask, AsyncProducerTask, HybridTask, ProducerTask
    from onceward.transaction import Transaction

logs.install()  # so that a formatter can name the log fields from the first line of a program on

__all__ = [
    "AsyncConsumerTask",
    "AsyncHybridTask",
    "AsyncProducerTask",
    "ConsumerTask",
    "HybridTask",
    "Onceward",
    "ProducerTask",
    "Transaction",
]

_CONSUMER, _PRODUCER = "onceward.task.mixins.consumer", "onceward.task.mixins.producer"
_HOMES = {
    "AsyncConsumerTask": _CONSUMER,
    "AsyncHybridTask": _PRODUCER,
    "AsyncProducerTask": _PRODUCER,
    "ConsumerTask": _CONSUMER,
    "HybridTask": _PRODUCER,
    "Onceward": "onceward.app",
    "ProducerTask": _PRODUCER,
    "Transaction": "onceward.transaction",
}


def __getattr__(name: str) -> Any:
    """Names are loaded when they are asked for: who needs one of them, or none, does not wait for the others."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
