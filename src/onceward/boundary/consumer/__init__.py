"""The honest consumer: fetch, apply and persist each fact, confirm the batch. Nothing is retried, nothing is hidden.

    FetchFacts(consumer_name, limit)
    for each fact: handler(fact, session) in one database transaction, committed
    ConfirmReceipt(consumer_name, highest offset)          only if every fact of the batch was done

A fact that fails ends the run with its exception: what comes after it is not touched, nothing of the batch is
confirmed, and the next fetch begins with the same facts. So the handler must be idempotent; `strategies` has three
ready ways.
"""

from onceward.boundary.consumer.consumer import BoundaryConsumer
from onceward.boundary.consumer.consumer_asyncio import AsyncBoundaryConsumer

__all__ = ["AsyncBoundaryConsumer", "BoundaryConsumer"]
