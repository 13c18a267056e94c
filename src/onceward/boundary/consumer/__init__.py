"""The plain consumer of a boundary: fetch, apply and persist each fact, confirm the batch. No retries, no magic.

    FetchFacts(consumer_name, limit)
    for each fact: handler(fact, session) in one database transaction, committed
    ConfirmReceipt(consumer_name, highest offset)          only if every fact of the batch was applied

A fact that fails ends the run with its exception: later facts are not touched, nothing of the batch is confirmed, and
the next fetch begins with the same facts. So the handler must be idempotent; `strategies` has three ready-made ways.
"""

from onceward.boundary.consumer.consumer import BoundaryConsumer
from onceward.boundary.consumer.consumer_asyncio import AsyncBoundaryConsumer

__all__ = ["AsyncBoundaryConsumer", "BoundaryConsumer"]
