"""onceward: take messages from anywhere and have each effect once in the end."""

from onceward.task.mixins.consumer import AsyncConsumerTask, ConsumerTask
from onceward.task.mixins.producer import AsyncHybridTask, AsyncProducerTask, HybridTask, ProducerTask
from onceward.telemetry import logs
from onceward.transaction import Transaction

logs.install()  # so that a formatter can name the log fields from the first line of a program on

__all__ = [
    "AsyncConsumerTask",
    "AsyncHybridTask",
    "AsyncProducerTask",
    "ConsumerTask",
    "HybridTask",
    "ProducerTask",
    "Transaction",
]
