"""onceward: take messages from anywhere and have each effect once in the end."""

from onceward.task.mixins.consumer import AsyncConsumerTask, ConsumerTask
from onceward.task.mixins.producer import AsyncHybridTask, AsyncProducerTask, HybridTask, ProducerTask
from onceward.transaction import Transaction

__all__ = [
    "AsyncConsumerTask",
    "AsyncHybridTask",
    "AsyncProducerTask",
    "ConsumerTask",
    "HybridTask",
    "ProducerTask",
    "Transaction",
]
