"""Connectors whose dead letters are kept in a store: `WithDeadLetters`, in asyncio `AsyncWithDeadLetters`."""

from onceward.deadletters.source.connector import WithDeadLetters
from onceward.deadletters.source.connector_asyncio import AsyncWithDeadLetters

__all__ = ["AsyncWithDeadLetters", "WithDeadLetters"]
